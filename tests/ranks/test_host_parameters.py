"""Parameters on the host: exact steps, peaks as predicted, state dicts, clipping, files."""

import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.runtime.parameters.clipping import Clipping
from shardwright.runtime.parameters.host_state import is_home
from shardwright.runtime.regions.region_calls import RegionCall
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness.peak_memory import counted, predicted
from tests.harness.ranks import run_ranks, whole
from tests.ranks.test_host_state import check_peaks_and_weights, subject
from tests.ranks.test_random_tilings import error

pytestmark = pytest.mark.ranks

OFFLOAD = " offload=optimizer,parameters"
BOTH = "dp_shard=2 mb=3 ac=full offload=activations,optimizer,parameters"
TEXTS = (
    "dp_replicate=2",
    "dp_replicate=2 mb=4",
    "dp_shard=2",
    "tp=2",
    "dp_shard=2 mb=3 ac=full",
)
# Without temporaries, which would be the host's.
made = partial(torch.optim.AdamW, lr=1e-2, fused=True)


def test_steps_are_exact_and_the_measured_peak_is_as_predicted():
    model, batch = subject()
    graph = capture_with_rules(model, (), batch).graph
    analysis, plans, expected = analyze(graph), {}, {}
    for text in (BOTH, *(one + end for one in TEXTS for end in ("", OFFLOAD))):
        plans[text] = sw.price(graph, "2xcpu", text)
        decisions = read_plan(plans[text], graph, analysis)
        name = "adamw_fused_by_host" if "parameters" in text else "adamw_fused"
        expected[text] = [predicted(graph, analysis, decisions, rank, name) for rank in range(2)]
    ranks = run_ranks(2, measured, plans)
    for text, memories in expected.items():
        for memory, rank in zip(memories, ranks, strict=True):
            assert rank[text]["error"] < 1e-10  # AdamW divides by small gradients
            assert rank[text]["goes on"] and rank[text]["norm"] < 1e-10
            if "parameters" in text:
                assert memory.parameters == memory.optimizer_state == 0
                further = 0.1 if "mb" in text else 0.0  # gradients before they are added up
                assert 0 <= memory.host / rank[text]["home"] - 1 <= further
    check_peaks_and_weights(expected, ranks, TEXTS, OFFLOAD, 0.75)


def measured(plans):
    """Of each plan the errors of three steps, bytes at the peak of one, and those on the host.

    One step is that of a loop of one's own, which clips gradients. Also whether a new module and
    optimizer go on from state dicts as these do.
    """
    found = {}
    model, batch = subject()
    serial = copy.deepcopy(model)
    reference = made(serial.parameters())
    for number in range(3):
        reference.zero_grad()
        serial(**batch).backward()
        norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.01 if number == 2 else 1e9)
        reference.step()
    for text, plan in plans.items():
        module = sw.parallelize(copy.deepcopy(model), plan)
        optimizer = made(module.parameters())
        for _ in range(2):
            module.train_step(optimizer, batch)
        saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
        mine = own_step(module, optimizer, batch)
        errors = (
            error(serial.get_parameter(name).detach(), whole(parameter))
            for name, parameter in module.named_parameters()
        )
        found[text] = {"error": max(errors), "norm": abs(mine / norm.item() - 1)}
        found[text]["weights"] = [tile(one.detach()).clone() for one in module.parameters()]
        there = module.parameters(), (one.grad for one in module.parameters()), state_of(optimizer)
        found[text]["home"] = sum(tile(value).nbytes for value in chain(*there))
        assert all(map(is_home, state_of(optimizer))) is ("optimizer" in text)
        assert all(map(is_home, module.parameters())) is ("parameters" in text)
        found[text]["goes on"] = goes_on(model, plan, saved, module, batch)
        found[text]["peak"] = counted(module, batch, fused)
    return found


def fused(parameters, *, foreach):
    assert foreach is False
    return made(parameters)


def own_step(module, optimizer, batch):
    """A step of a loop of one's own; the norm of the gradients before they were clipped."""
    optimizer.zero_grad()
    module(**batch).backward()
    norm = Clipping(dict(module.named_parameters())).clip(0.01)
    optimizer.step()
    return float(norm)


def goes_on(model, plan, saved, module, batch):
    """Whether another module that loads what was `saved` makes the next step as `module` did."""
    other = sw.parallelize(copy.deepcopy(model), plan)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    optimizer = made(other.parameters())
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert all(map(is_home, state_of(optimizer))) is ("optimizer" in plan.offload)
    own_step(other, optimizer, batch)
    pairs = zip(other.parameters(), module.parameters(), strict=True)
    return all(torch.equal(tile(a), tile(b)) for a, b in pairs)


def state_of(optimizer):
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if value.dim()]


def tile(value):
    return value.to_local() if isinstance(value, DTensor) else value


def test_frozen_and_unused_parameters_are_on_the_host_and_files_of_weights_are_the_same(tmp_path):
    model, batch = subject()
    model.blocks[0].requires_grad_(False)
    model.eval()
    plan = sw.price(sw.capture(model, (), batch), "1xcpu", "dp_shard=1" + OFFLOAD)
    module = sw.parallelize(model, plan)
    optimizer, reference = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, model))
    for one, step in ((model, reference), (module, optimizer)):
        one(**batch).backward()
        step.step()
        step.zero_grad()
    with torch.no_grad():
        assert torch.equal(module(**batch), model(**batch))
    assert all(map(is_home, module.parameters()))
    for (name, mine), theirs in zip(module.state_dict().items(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    module.save_pretrained(tmp_path)
    loaded = sw.parallelize(copy.deepcopy(model).to("meta"), plan, weights=tmp_path)
    assert all(map(is_home, loaded.parameters()))
    assert torch.equal(loaded(**batch), module(**batch))


def test_what_cannot_run_is_refused():
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    staged = sw.price(graph, "2xcpu", "pp=2 mb=4")
    with pytest.raises(PlanError, match="parameters on the host and has pipeline stages"):
        sw.parallelize(model, replace(staged, offload=("optimizer", "parameters")))
    with pytest.raises(ValueError, match="pipeline stages keep parameters on the device"):
        sw.price(graph, "2xcpu", "pp=2 mb=4" + OFFLOAD)
    with pytest.raises(ValueError, match="optimizer muon may need all of its state at once"):
        sw.price(graph, "1xcpu", "dp_shard=1" + OFFLOAD, "muon")
    module = sw.parallelize(model, sw.price(graph, "1xcpu", "dp_shard=1" + OFFLOAD))
    module(**batch).backward()
    with pytest.raises(PlanError, match="LBFGS may need that of several parameters at once"):
        torch.optim.LBFGS(module.parameters()).step(lambda: module(**batch))


class Held(torch.autograd.Function):
    """A product with squares that keeps its weight where no hook of saved tensors sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.square()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.square().T, 2 * ctx.weight * (ctx.x.T @ grad)


def test_weights_that_custom_operators_keep_by_themselves_stay_there():
    """Of a weight that is passed again, a custom operator may keep what no hook has seen."""
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    leaf = weight.clone().requires_grad_()
    (Held.apply(x, leaf) @ leaf).sum().backward()
    region = SimpleNamespace(
        inputs=("x", "w"),
        trained=(False, True),
        differentiable=(True,),
        dropped=(False, True),
        is_of_torch=False,
    )
    call = RegionCall(region, lambda x, w, _: (Held.apply(x, w) @ w,), {1: "total/w"})
    (result,) = call.forward([x, weight], torch.zeros(2))
    _, totals = call.backward([torch.ones_like(result)], {1: weight}, {"total/w": None})
    torch.testing.assert_close(totals["total/w"], leaf.grad)
