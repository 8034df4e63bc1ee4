"""Plans along several mesh axes have the costs of few layers, which equal those of the whole."""

from dataclasses import replace

import pytest

from shardwright.ir.layout import Replicate
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.planner.plans.simulated.memory_refinement import (
    MemoryRefinement,
    ranks_that_differ,
)
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.simulate.memory.step.rank_step import StepSimulation
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import in_sequence_parallelism, residual_layers
from tests.harness.rotation import rotating

MACHINE = preset("2x4xH100")
GRAPH = residual_layers(28, scaled=True)


def with_whole_scales(plan):
    """The plan that stores scales on all devices: their gradients are summed along each axis.

    Searches find such plans, and no strategy has them.
    """
    parameters = [
        replace(
            one, layout=replace(one.layout, placements=(Replicate(),) * len(one.layout.placements))
        )
        if one.name.endswith(".scale")
        else one
        for one in plan.parameters
    ]
    return replace(plan, parameters=tuple(parameters))


def assert_few_layers_suffice(graph, strategy, ahead=None):
    """Time and peak memory of few layers are those of the whole program."""
    expansion = Expansion(graph, MACHINE, "adamw_fused")
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    plan = with_whole_scales(plan)
    if "tp=" in strategy:
        plan = in_sequence_parallelism(plan)
    plan = replace(plan, ahead=ahead or plan.ahead)
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    decisions = read_plan(plan, graph, analysis)
    trainer = MemoryRefinement(MACHINE, "adamw_fused", tracer).trainer(decisions)
    lowering = PlanLowering(graph, analysis, decisions, MACHINE.backend_spec.alone_bytes)
    costs = FoldedCosts(graph, analysis, MACHINE)
    whole = TimeRefinement(graph, MACHINE).refined(plan, lowering)
    assert costs.seconds(plan, decisions) == pytest.approx(whole.step_seconds, rel=1e-9)
    peaks = [
        StepSimulation(lowering, rank, trainer, tracer).memory().peak
        for rank in ranks_that_differ(lowering)
    ]
    assert costs.peak(plan, decisions, trainer, tracer).bytes == max(peaks)


AXES = ("dp_replicate=2 dp_shard=4", "dp_replicate=2 dp_shard=2 tp=2", "dp_shard=4 tp=2")
WAYS = ("", "ac=full", "mb=4", "ac=full mb=4", "ac=every(2)", "zero=1 ac=full")


@pytest.mark.parametrize(
    "strategy",
    rotating([f"{axes} {way}" for axes in AXES for way in WAYS], 3, kinds=str.split),
)
def test_plans_along_several_axes_fold(strategy):
    assert_few_layers_suffice(GRAPH, strategy)


@pytest.mark.parametrize("rest", ["", " ac=full", " ac=full sync=last"])
def test_stages_along_several_axes_fold(rest):
    """They start all gathers of what they keep before their first micro-batch, layer by layer.

    Those that recompute wait for the sums of all layers along the first axis, then for the others.
    """
    assert_few_layers_suffice(GRAPH, f"pp=2 dp_replicate=2 dp_shard=2 mb=4{rest}")


@pytest.mark.parametrize(
    "strategy", ["dp_shard=8", "dp_shard=4 tp=2", "dp_replicate=2 dp_shard=4 ac=full"]
)
def test_plans_with_many_buckets_in_flight_fold(strategy):
    assert_few_layers_suffice(residual_layers(40, scaled=True), strategy, ahead=8)


def test_a_sum_that_all_layers_exceed_is_tried_once_and_by_three_layers():
    """A bucket has a limit, whatever number of layers remains: the program is lowered whole.

    Were it one of three layers, these would seem to be all in a program of few.
    """
    graph = residual_layers(30, inner=lambda _: 64)  # seven layers in a bucket
    expansion = Expansion(graph, MACHINE, "adamw")
    analysis = expansion.sources.analysis
    plan = expansion.expanded(Strategy.parse("dp_shard=4 tp=2")).plan(0.0, ())
    costs, lowered = FoldedCosts(graph, analysis, MACHINE), []
    known_of = costs._known_of
    costs._known_of = lambda *given: lowered.append(known_of(*given)) or lowered[-1]
    assert costs.seconds(plan, read_plan(plan, graph, analysis)) is None
    assert sum(one is not None for one in lowered) == 2


@pytest.mark.parametrize("axes", ["dp_shard=8", "dp_replicate=2 dp_shard=4"])
def test_layers_that_repeat_by_threes_fold(axes):
    assert_few_layers_suffice(residual_layers(40), f"{axes} ac=every(3)")


def test_what_folded_the_last_plan_on_a_mesh_is_tried_first():
    graph = residual_layers(40)
    expansion = Expansion(graph, MACHINE, "adamw")
    analysis = expansion.sources.analysis
    plan = expansion.expanded(Strategy.parse("dp_shard=8 ac=every(3)")).plan(0.0, ())
    costs, ways = FoldedCosts(graph, analysis, MACHINE), []
    known_of = costs._known_of
    costs._known_of = lambda *given: ways.append(given[-1]) or known_of(*given)
    decisions = read_plan(plan, graph, analysis)
    first = costs.seconds(plan, decisions)
    before = [*ways]
    assert len(before) > 1
    assert costs.seconds(replace(plan, name="another"), decisions) == first
    assert ways[len(before) :] == before[-1:]
