"""Loops of layers that were left out: which transfers an iteration starts, and who waits."""

from unittest import mock

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.unrolled import Loop, unrolled
from shardwright.program.step.instructions import Wait
from shardwright.rules.analysis import analyze
from shardwright.simulate.time import step_seconds
from tests.harness.layered_graphs import residual_layers

GRAPH, MACHINE = residual_layers(9), preset("4xH100")


@pytest.fixture(scope="module")
def loops():
    """All loops of the plans of one mesh."""
    analysis = analyze(GRAPH)
    plans = search(GRAPH, MACHINE, PlanOptions.of(meshes=[Mesh.parse("dp=4")]))
    found = []

    def kept(sections):
        order = unrolled(sections)
        found.extend(one for one in order if isinstance(one, Loop))
        return order

    with mock.patch.object(step_seconds, "unrolled", kept):
        for plan in (*plans, *plans.baselines):
            FoldedCosts(GRAPH, analysis, MACHINE).seconds(plan, read_plan(plan, GRAPH, analysis))
    return found


def waited(loop, number):
    return {one.transfer for one in loop.iteration(number) if isinstance(one.instruction, Wait)}


def test_a_transfer_is_waited_for_as_many_iterations_later_as_its_lag_says(loops):
    lags = set()
    for loop in loops:
        lags |= {*loop.lags}
        assert loop.depth < loop.times
        for name, lag in zip(loop.started(0), loop.lags, strict=True):
            waits = [n for n in range(loop.times) if name in waited(loop, n)]
            assert waits == ([] if lag is None else [lag])
    assert {0, 1} <= lags
