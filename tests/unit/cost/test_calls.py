"""Timings of operators at local sizes, and what they say of other sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cost.calls import form_of, timed
from shardwright.cost.dominating import dominating
from shardwright.ir.calls import Timing
from shardwright.ir.machine import Machine
from shardwright.rules.analysis import analyze

MACHINE = Machine.preset("2xcpu")


@pytest.fixture(scope="module")
def graph():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32), nn.Dropout(0.5))
    return sw.capture(_Loss(model), (torch.randn(16, 64),))


class _Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


def form(graph, name):
    (op,) = [op for op in graph.ops if op.name == name]
    return form_of(op, analyze(graph).rules[name], graph)


def test_a_call_has_the_local_sizes_of_its_tensors(graph):
    found = form(graph, "linear")
    rule = analyze(graph).rules["linear"]
    sizes = {factor.name: factor.size for factor in rule.factors}
    assert str(found.at(list(sizes.values()))) == (
        "aten.linear.default(%0, %1, %2) float32[16, 64] float32[256, 64]' float32[256]'"
    )
    sizes["n"] //= 2
    assert str(found.at(list(sizes.values()))) == (
        "aten.linear.default(%0, %1, %2) float32[16, 64] float32[128, 64]' float32[128]'"
    )


def test_what_draws_random_numbers_is_no_call(graph):
    (drawn,) = [op for op in graph.ops if "dropout" in op.kind or "rand" in op.kind]
    assert form(graph, drawn.name) is None


def test_timings_hold_where_they_were_made_and_scale_the_formula_elsewhere(graph):
    found = form(graph, "linear")
    rule = analyze(graph).rules["linear"]
    place = [factor.name for factor in rule.factors].index("n")
    whole = [factor.size for factor in rule.factors]
    half, quarter = list(whole), list(whole)
    half[place], quarter[place] = 128, 64
    sizes = np.array([whole, half, quarter]).T
    formula, same = np.array([4.0, 2.0, 1.0]), np.ones(3, bool)
    timings = (
        Timing(str(found.at(whole)), 8.0, 1.0),
        Timing(str(found.at(half)), 16.0, 0.0),
    )
    assert timed(formula, found, sizes, timings, same).tolist() == pytest.approx([8.0, 16.0, 4.0])
    back = timed(formula, found, sizes, timings, same, backward=True)
    assert back.tolist() == pytest.approx([1.0, 0.0, 0.25])
    assert timed(formula, found, sizes, (), same).tolist() == formula.tolist()
    placed = np.array([True, False, True])  # what another operator computes at such a size
    assert timed(formula, found, sizes, timings, placed).tolist() == pytest.approx([8.0, 4.0, 2.0])


def test_plans_cost_what_was_timed(graph):
    plain = sw.search(graph, MACHINE)
    analysis = analyze(graph)
    calls = dominating(graph, analysis, (*plain, *plain.baselines))
    assert calls[0].target == "aten.linear.default"
    assert len({str(call) for call in calls}) == len(calls)
    timings = tuple(Timing(str(call), 1e-3, 2e-3) for call in calls)
    machine = replace(MACHINE, device=replace(MACHINE.device, timings=timings))
    for plan in sw.search(graph, machine).baselines:
        linear = [op for op in plan.ops if op.target == "aten.linear.default"]
        assert [op.seconds for op in linear] == pytest.approx([3e-3, 3e-3])
        assert [op.backward_seconds for op in linear] == pytest.approx([2e-3, 2e-3])


def test_plans_in_micro_batches_have_calls_of_their_sizes(graph):
    plan = sw.search(graph, MACHINE, micro_batches=(2,)).fastest()
    assert plan.micro_batches == 2
    (whole,) = {str(call) for call in dominating(graph, analyze(graph), (plan,))[:1]}
    assert "linear" in whole and "16" not in whole.partition("64")[0]
