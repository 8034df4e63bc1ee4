from dataclasses import replace
from datetime import UTC, datetime

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.machine.model import Measured
from shardwright.machine.presets import preset
from shardwright.planner.settle import charged_seconds
from tests.harness.layered_graphs import residual_layers

GRAPH, MESHES = residual_layers(4), [Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2")]
PLAIN = replace(preset("4xH100"), overlap=0.0)
MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())
PARTS = 0.0, 0.5, 1.0


def searched(overlap, measured):
    machine = replace(PLAIN, overlap=overlap, measured=measured)
    return search(GRAPH, machine, PlanOptions.of(meshes=MESHES))


@pytest.fixture(scope="module")
def frontiers():
    return {
        (overlap, measured is None): searched(overlap, measured)
        for overlap in PARTS
        for measured in (None, MEASURED)
    }


@pytest.mark.parametrize("specified", [True, False])
def test_a_machine_that_hides_more_is_never_slower(frontiers, specified):
    for less, more in [(0.0, 0.5), (0.5, 1.0)]:
        before, after = frontiers[less, specified], frontiers[more, specified]
        named = {plan.name: plan for plan in after.baselines}
        for plan in before.baselines:
            most = before.settled(plan).step_seconds
            assert after.settled(named[plan.name]).step_seconds <= most * (1 + 1e-12)
        assert after[0].step_seconds <= before[0].step_seconds * (1 + 1e-3)
    known = [frontiers[overlap, specified] for overlap in (0.0, 1.0)]
    before, after = (one.settled(one.baselines[0]) for one in known)
    assert before.name == after.name == "data parallel"
    assert after.step_seconds < 0.95 * before.step_seconds


@pytest.mark.parametrize("specified", [True, False])
@pytest.mark.parametrize("overlap", PARTS)
def test_no_bound_is_above_a_simulated_step(frontiers, overlap, specified):
    """Tables charge launches of partly filled buckets, of which programs save some."""
    found = frontiers[overlap, specified]
    assert [(p.step_seconds, p.peak_bytes) for p in found] == list(found.costs)
    shown = [found.settled(plan) for plan in (*found, *found.baselines)]
    for plan in (*found, *found.baselines):
        within = [one.step_seconds for one in shown if one.peak_bytes <= plan.peak_bytes]
        assert 0 < plan.lower_bound_seconds <= min(within) * 1.02
        if not specified:
            assert plan.step_seconds == plan.timeline.seconds
    for plan in shown[len(found) :]:
        assert found.fastest(plan.peak_bytes).step_seconds <= plan.step_seconds


@pytest.mark.parametrize("specified", [True, False])
def test_bounds_are_close_where_operators_hide_messages(frontiers, specified):
    best = frontiers[0.5, specified].fastest("unlimited")
    assert best.step_seconds <= 1.1 * best.lower_bound_seconds


def test_tables_charge_what_is_not_hidden():
    machine = replace(PLAIN, overlap=0.75, gather_overlap=0.5)

    def charged(*collectives, on=machine):
        one = PlannedTransfer("w", "op", Phase.FORWARD, collectives, 8, 4.0)
        return charged_seconds(one, on)

    assert charged("all_reduce dp") == 1.0
    assert charged("all_gather dp") == charged("reduce_scatter dp") == 2.0
    assert charged("slice dp") == 4.0
    assert charged("all_reduce dp", on=replace(machine, charges_hidden=True)) == 4.0
