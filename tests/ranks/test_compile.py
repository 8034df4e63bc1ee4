"""Compiled parallel modules train with the same numbers, and equal layers are compiled once."""

import shutil

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.shape_variants import ShapeVariants
from tests.harness import models
from tests.harness.ranks import run_ranks
from tests.unit.runtime.graph_modules.test_repeats import deep

STEPS = 4
CASES = {  # model, plan, backend
    "gpt2": (lambda: models.gpt2(heads=2, hidden=12), "tensor parallel", "aot_eager"),
    "mlp": (models.mlp, "fully sharded", "inductor"),
}
has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.hf),
        pytest.param("mlp", marks=pytest.mark.skipif(not has_compiler, reason="no C++ compiler")),
    ],
)
def test_a_compiled_module_trains_with_the_same_losses(name):
    example, choice, _ = CASES[name]
    model, batch = example()
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"))
    plan = {plan.name: plan for plan in frontier.baselines}[choice]
    run_ranks(2, _compare, name, plan_to_json(plan))


def _compare(name, text):
    example, _, backend = CASES[name]
    eager = _train(*example(), text, lambda module: module)
    if backend == "inductor":  # as a job does
        compiled = _train_job(*example(), text)
    else:
        compiled = _train(
            *example(), text, lambda module: torch.compile(module, backend=backend, fullgraph=True)
        )
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=0.0)
    assert len(set(eager)) == STEPS
    if backend != "inductor":
        assert counters["stats"]["unique_graphs"] == 1


def _train_job(model, batch, text):
    module = ShapeVariants(model, sw.Plan.from_json(text), [], seed=3, compiled=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses, graphs = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(module.forward_backward(batch).item())
        optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] >= 1
    shared = module.main._sw_program.regions.compiled.shared
    assert any(segment._compiled_call_impl is not None for segment in shared)
    assert any(module.main._sw_program.program.transfers()), "communication stays outside"
    assert graphs == [graphs[0]] * STEPS, "compiled again after the first step"
    return losses


def _train(model, batch, text, wrap):
    module = wrap(sw.parallelize(model, sw.Plan.from_json(text), seed=3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


STRATEGIES = ("dp_shard=2 ac=full", "tp=2", "pp=2 mb=2")


@pytest.mark.ranks
@pytest.mark.slow
def test_layers_share_compiled_code_under_every_strategy():
    """The layers draw; the backend "eager" runs the operators themselves, in float64."""
    texts = []
    for layers in (3, 5):
        graph = sw.capture(*_deep(layers))
        texts += [(layers, plan_to_json(sw.price(graph, "2xcpu", one))) for one in STRATEGIES]
    run_ranks(2, _compare_layers, texts)


def _deep(layers):
    model, batch = models.double(*deep(layers, batch=8))
    return model, (), batch


def _compare_layers(texts):
    compile_with = fx.GraphModule.compile
    fx.GraphModule.compile = lambda module, **how: compile_with(module, backend="eager", **how)
    codes = []
    for layers, text in texts:
        found = []
        for compiled in (False, True):
            model, _, batch = _deep(layers)
            module = sw.parallelize(model, sw.Plan.from_json(text), seed=3)
            if compiled:
                module.compile_programs()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                loss = module.train_step(optimizer, batch)
            tensors = {name: p.detach().clone() for name, p in module.named_parameters()}
            found.append({"loss": loss, **tensors})
        eager, compiled = found
        assert eager.keys() == compiled.keys()
        for key, value in eager.items():
            torch.testing.assert_close(compiled[key], value, rtol=1e-14, atol=1e-15)
        codes.append(len(module._sw_program.regions.compiled.shared))
    assert codes[: len(STRATEGIES)] == codes[len(STRATEGIES) :], "as many for five layers as three"
