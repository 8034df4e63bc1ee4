"""Updates in groups: the same numbers, and the predicted temporaries."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.rules.analysis import analyze
from tests.harness.peak_memory import counted, predicted

MIB = 2**20
# `torch.optim` hides its modules.
SGD_MODULE, ADAM_MODULE = (sys.modules[f"torch.optim.{name}"] for name in ("sgd", "adam"))


def model():
    """Five parameters of 1 MiB, and a batch of few rows."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(5)]
    return nn.Sequential(*layers, nn.Flatten(0), nn.Softmax(0))


def batch():
    return {"input": torch.linspace(-1, 1, 1024).view(2, 512)}


class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input):
        return self.inner(input).square().sum()


def parallelized(plan):
    return sw.parallelize(Loss(model()), plan)


@pytest.fixture(scope="module")
def plan():
    graph = sw.capture(Loss(model()), kwargs=batch())
    return graph, sw.search(graph, "1xcpu", optimizer="adamw_foreach").fastest()


def foreach(parameters, foreach=True):
    return torch.optim.AdamW(parameters, foreach=True)


@pytest.mark.parametrize("group, counts", [(0, ()), (2 * MIB, (2, 2, 1)), (1, (1, 1, 1, 1, 1))])
def test_predicted_temporaries_are_those_of_a_group(plan, group, counts):
    graph, found = plan
    found = replace(found, update_group_bytes=group)
    analysis = analyze(graph)
    decisions = read_plan(found, graph, analysis)
    (*_, update) = step_program(graph, analysis, decisions, 0).instructions
    assert update.groups == counts
    expected = predicted(graph, analysis, decisions, optimizer="adamw_foreach").peak
    module = parallelized(found)
    temporaries = expected - 4 * 5 * MIB  # weights, gradients and two tensors of state
    assert temporaries == pytest.approx(MIB * max(counts or (5,)), rel=0.05)
    assert counted(module, batch(), foreach) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name, options", [
    ("AdamW", {"foreach": True}), ("RAdam", {"foreach": True}), ("Adagrad", {}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
])  # fmt: skip
def test_numbers_and_state_are_those_of_one_group(plan, name, options):
    _, found = plan
    results = []
    for group in (0, 2 * MIB):
        module = parallelized(replace(found, update_group_bytes=group))
        some, *others = module.parameters()
        optimizer = getattr(torch.optim, name)(
            [{"params": others}, {"params": [some], "lr": 0.5}], lr=0.1, **options
        )
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            module.train_step(optimizer, batch())
            schedule.step()
        results.append((module.state_dict(), optimizer.state_dict()))
    (weights, state), (other_weights, other_state) = results
    torch.testing.assert_close(other_weights, weights, rtol=0, atol=0)
    torch.testing.assert_close(other_state["state"], state["state"], rtol=0, atol=0)
    assert other_state["param_groups"] == state["param_groups"]


def test_own_loops_step_in_groups_too_and_end_what_an_error_left(plan, monkeypatch):
    _, found = plan
    module = parallelized(replace(found, update_group_bytes=1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    updated, update = [], SGD_MODULE.sgd

    def counted_update(parameters, *args, **kwargs):
        updated.append(len(parameters))
        if len(updated) == 2:
            raise RuntimeError("in mid-step")
        update(parameters, *args, **kwargs)

    def closure():
        assert len(optimizer.param_groups) == 1  # the loop's own
        optimizer.zero_grad()
        loss = module(**batch())
        loss.backward()
        return loss

    monkeypatch.setattr(SGD_MODULE, "sgd", counted_update)
    with pytest.raises(RuntimeError, match="in mid-step"):
        optimizer.step(closure)
    optimizer.step(closure)
    assert updated == [1] * (2 + 5)
    assert len(optimizer.param_groups) == 1


def test_state_of_three_groups_is_on_the_device_at_once(plan):
    graph, _ = plan
    found = replace(sw.price(graph, "1xcpu", "dp_shard=1 offload=optimizer"), update_group_bytes=1)
    analysis = analyze(graph)
    decisions = read_plan(found, graph, analysis)
    expected = predicted(graph, analysis, decisions, optimizer="adamw_on_host").peak
    temporaries = expected - 2 * 5 * MIB  # weights and gradients
    assert temporaries == pytest.approx((2 * 3 + 2) * MIB, rel=0.05)  # and those of a loop
    assert counted(parallelized(found), batch()) == pytest.approx(expected, rel=0.01)


def test_a_step_keeps_its_other_arguments(plan):
    class Own(torch.optim.SGD):
        def step(self, closure=None, factor=1):
            factors.append(factor)
            return super().step(closure)

    _, found = plan
    factors, module = [], parallelized(found)
    optimizer = Own(module.parameters(), lr=0.1)
    with torch.no_grad():
        optimizer.step(lambda: None, 2)
        optimizer.step(closure=lambda: None, factor=3)
    assert factors == [2, 3]


def test_an_optimizer_that_may_mix_parameters_steps_at_once_and_says_so(plan):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            assert len(self.param_groups) == 1
            return super().step(closure)

    _, found = plan
    module = parallelized(replace(found, update_group_bytes=1))
    with pytest.warns(UserWarning, match="Own updates all parameters at once"):
        module.train_step(Own(module.parameters(), lr=0.1), batch())


def test_a_fused_update_is_one_group(plan, monkeypatch):
    _, found = plan
    module = parallelized(replace(found, update_group_bytes=1))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    counts, update = [], ADAM_MODULE.adam

    def counted_update(parameters, *args, **kwargs):
        counts.append(len(parameters))
        update(parameters, *args, **kwargs)

    monkeypatch.setattr(ADAM_MODULE, "adam", counted_update)
    module.train_step(optimizer, batch())
    assert counts == [5]
