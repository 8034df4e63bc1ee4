from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner.settle import most_hidden
from tests.harness.layered_graphs import residual_layers

GRAPH, MESHES = residual_layers(4), [Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2")]
PLAIN = preset("4xH100")


def searched(overlap):
    return search(GRAPH, replace(PLAIN, overlap=overlap), PlanOptions.of(meshes=MESHES))


@pytest.fixture(scope="module")
def frontiers():
    return {overlap: searched(overlap) for overlap in (0.0, 0.5, 1.0)}


def test_a_machine_that_hides_more_is_never_slower(frontiers):
    for less, more in [(0.0, 0.5), (0.5, 1.0)]:
        named = {plan.name: plan for plan in frontiers[more].baselines}
        for plan in frontiers[less].baselines:
            other = named[plan.name]
            before = frontiers[less].settled(plan).step_seconds
            assert other.step_seconds <= before * (1 + 1e-12)
        assert frontiers[more][0].step_seconds <= frontiers[less][0].step_seconds * (1 + 1e-3)
    before, after = (frontiers[o].baselines[0] for o in (0.0, 1.0))
    assert before.name == after.name == "data parallel"
    assert after.step_seconds < 0.95 * before.step_seconds


def test_what_may_be_hidden_contains_the_packing_of_buckets():
    """Of a tile and its copy, twice, and of the gradient: ten reads or writes of a parameter."""
    device = PLAIN.device
    halved = replace(PLAIN, device=replace(device, bytes_per_s=device.bytes_per_s / 2))
    fast, slow = (most_hidden(GRAPH, machine, MESHES[0]) for machine in (PLAIN, halved))
    size = sum(GRAPH.tensor[leaf.name].bytes for leaf in GRAPH.leaves_of(LeafKind.PARAMETER))
    once = size / (device.bytes_per_s * device.efficiency.streaming)
    assert 10 * once <= (slow - fast) * (1 + 1e-9) < 11 * once


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_times_are_those_of_the_timeline_and_no_bound_is_above(frontiers, overlap):
    found = frontiers[overlap]
    assert [(p.step_seconds, p.peak_bytes) for p in found] == list(found.costs)
    for plan in (*found, *found.baselines):
        if overlap:
            assert plan.step_seconds == plan.timeline.seconds
        else:
            assert plan.step_seconds == pytest.approx(plan.added_seconds, rel=1e-9)
        # Whatever is faster within this memory, a bound must be below it too.
        least = min(p.step_seconds for p in found if p.peak_bytes <= plan.peak_bytes)
        assert 0 < plan.lower_bound_seconds <= least * (1 + 1e-12)
    for baseline in found.baselines:
        shown = found.settled(baseline)
        assert found.fastest(shown.peak_bytes).step_seconds <= shown.step_seconds
