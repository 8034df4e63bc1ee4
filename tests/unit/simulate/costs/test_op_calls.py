"""Timings of operators at local sizes, and what they say of other sizes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
import shardwright.planner.tables.hot_ops as dominating_module
from shardwright.machine.calls import Timing
from shardwright.machine.presets import preset
from shardwright.planner.tables.hot_ops import hot_calls
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.op_calls import form_of, timed

MACHINE = preset("2xcpu")


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
    timings = (
        Timing(str(found.at(whole)), 8.0, 1.0),
        Timing(str(found.at(half)), 16.0, 0.0),
    )

    def formula(at):
        return at[place] / 64

    def every(at):
        return np.ones(at.shape[1], bool)

    def cut(at):  # what another operator computes at such a size
        return at[place] != 128

    # A quarter is nearest to the half, of which the formula said 2.
    seconds = timed(formula, found, sizes, timings, every)
    assert seconds.tolist() == pytest.approx([8.0, 16.0, 8.0])
    back = timed(formula, found, sizes, timings, every, backward=True)
    assert back.tolist() == pytest.approx([1.0, 0.0, 0.25])
    assert timed(formula, found, sizes, (), every).tolist() == [4.0, 2.0, 1.0]
    seconds = timed(formula, found, sizes, timings, cut)
    assert seconds.tolist() == pytest.approx([8.0, 4.0, 2.0])
    between = np.array([whole]).T
    for size, off in ((182, 2.0), (181, 8.0)):  # nearer to 256, and to 128
        between[place] = size
        seconds = timed(formula, found, between, timings, every)
        assert seconds.tolist() == pytest.approx([off * size / 64])


@pytest.mark.parametrize(
    "took, expected",
    [
        ((8.0, 8.2), (8.1, 8.1)),  # less apart than noise: both are their mean
        ((8.0, 16.0), (8.02, 15.95)),  # far more: told apart
        ((8.0, 8.8), (8.135, 8.654)),  # 9.5 % apart: noise explains a part
    ],
)
def test_calls_that_compute_equally_much_are_told_apart_as_far_as_noise_lets_them(
    graph, took, expected
):
    found = form(graph, "linear")
    rule = analyze(graph).rules["linear"]
    names = [factor.name for factor in rule.factors]
    whole = [factor.size for factor in rule.factors]
    tall, wide, small = list(whole), list(whole), list(whole)
    first, second = (names.index(name) for name in (names[0], "n"))
    tall[first], wide[second] = whole[first] // 2, whole[second] // 2
    small[first], small[second] = tall[first], wide[second]
    calls = [str(found.at(sizes)) for sizes in (tall, wide, small)]
    timings = tuple(Timing(call, s, s / 2) for call, s in zip(calls, (*took, 1.0), strict=True))

    def formula(at):
        return at[first] * at[second] / (whole[first] * whole[second] / 8.0)

    def every(at):
        return np.ones(at.shape[1], bool)

    sizes = np.array([tall, wide, small]).T
    seconds = timed(formula, found, sizes, timings, every)
    assert seconds.tolist() == pytest.approx([*expected, 1.0], rel=2e-3)
    back = timed(formula, found, sizes, timings, every, backward=True)
    assert back.tolist() == pytest.approx([t / 2 for t in (*expected, 1.0)], rel=2e-3)
    # What was not timed is as far off as what is nearest to it, with the noise taken out there.
    taller = list(tall)
    taller[first] //= 2
    (elsewhere,) = timed(formula, found, np.array([taller]).T, timings[:2], every)
    assert elsewhere == pytest.approx(expected[0] / 2, rel=2e-3)


def test_a_timing_says_how_far_the_formula_is_off_of_the_same_operator_elsewhere(graph):
    """Of an operator none of whose own sizes was timed: layers of a network grow."""
    analysis = analyze(graph)
    relu = form(graph, "relu")
    sizes = np.array([[f.size for f in analysis.rules["relu"].factors]]).T
    args = sizes, (Timing("aten.relu.default(%0) float32[3, 5]'", 6.0, 1.0),)

    def formula(at):
        return at.prod(axis=0) / 15.0

    def every(at):
        return np.ones(at.shape[1], bool)

    assert timed(formula, relu, *args, every).tolist() == [6 * 16 * 256 / 15]
    others = (
        "aten.relu.default(%0) float32[3, 5]",  # without a gradient
        "aten.relu.default(%0) float64[3, 5]'",
        "aten.relu.default(%0) float32[3, 5, 1]'",
        "aten.gelu.default(%0) float32[3, 5]'",
    )
    for call in others:
        seconds = timed(formula, relu, sizes, (Timing(call, 6.0, 1.0),), every)
        assert seconds.tolist() == [16 * 256 / 15]


def test_sizes_are_found_from_the_tensors_of_a_call(graph):
    found = form(graph, "linear")
    whole = [factor.size for factor in analyze(graph).rules["linear"].factors]
    assert found.sizes_of(found.at(whole).given, [0] * len(whole)) == whole
    given = found.at(whole).given
    assert found.sizes_of(given[:2], whole) is None
    assert found.sizes_of((given[0], given[1], replace(given[2], shape=(7,))), whole) is None


def test_one_call_at_least_of_every_operator_is_timed(graph, monkeypatch):
    """Of many that seem to be short none would be, and the formula would never be found wrong."""
    monkeypatch.setattr(dominating_module, "PART", 0.1)  # of which the first product is more
    plan = sw.search(graph, preset("1xcpu")).fastest()
    found = [call.target for call in hot_calls(graph, analyze(graph), (plan,))]
    assert found[0] == "aten.linear.default"
    assert "aten.relu.default" in found
    assert len(set(found)) == len(found)  # and no second product, which is shorter


def test_plans_cost_what_was_timed(graph):
    plain = sw.search(graph, MACHINE)
    analysis = analyze(graph)
    calls = hot_calls(graph, analysis, (*plain, *plain.baselines))
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
    (whole,) = {str(call) for call in hot_calls(graph, analyze(graph), (plan,))[:1]}
    assert "linear" in whole and "16" not in whole.partition("64")[0]
