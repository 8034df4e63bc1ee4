"""What the allocator reserves follows from few layers, as their requests are repeated."""

from dataclasses import replace

import pytest

from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.planner.plans.simulated.memory_refinement import MemoryRefinement
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.sections import FoldedGraph, Layer, NotPeriodicError
from shardwright.simulate.memory.step.whole_requests import whole_order
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import in_sequence_parallelism, residual_layers

MACHINE = replace(preset("4xH100"), overlap=0.6, arrival_skew_seconds=20e-6)


def reserved(graph, strategy, ahead=1, machine=MACHINE, changed=lambda plan: plan):
    """Bytes that the allocator reserves, by few layers and by all."""
    expansion = Expansion(graph, machine, "adamw")
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    plan = replace(expansion.expanded(Strategy.parse(strategy)).plan(0.0, ()), ahead=ahead)
    plan = changed(plan)
    decisions, costs = read_plan(plan, graph, analysis), FoldedCosts(graph, analysis, machine)
    given = plan, decisions, MemoryRefinement(machine, "adamw", tracer).trainer(decisions), tracer
    few = costs.reserved(*given, costs.peak(*given).rank)
    memory = Refinement(graph, machine, "adamw", tracer, analysis).settled(plan).memory
    return few, max(0, memory.reserved - memory.libraries)


@pytest.mark.parametrize(
    ("strategy", "ahead"),
    [
        *(("dp_replicate=4", 1), ("dp_shard=4", 2), ("dp_shard=4 ac=full", 1), ("tp=4", 1)),
        *(("dp_shard=2 tp=2", 1), ("dp_shard=4 mb=4", 2), ("dp_shard=4 reshard=off", 1)),
    ],
)
def test_few_layers_give_what_is_reserved_for_all(strategy, ahead):
    few, all_layers = reserved(residual_layers(12), strategy, ahead)
    assert few == all_layers > 0


@pytest.mark.parametrize(("strategy", "ahead"), [("dp_replicate=4", 1), ("dp_shard=4 ac=full", 2)])
def test_updates_are_in_the_groups_of_all_layers(strategy, ahead):
    few, all_layers = reserved(residual_layers(14, scaled=True), strategy, ahead)
    assert few == all_layers > 0


@pytest.mark.parametrize("strategy", ["dp_replicate=4", "dp_shard=4", "tp=4", "dp_shard=4 mb=4"])
def test_sums_of_all_layers_read_the_gradients_of_each(strategy):
    few, all_layers = reserved(residual_layers(12, masks=1, learned=True), strategy)
    assert few == all_layers > 0


@pytest.mark.parametrize("strategy", ["tp=4", "dp_shard=2 tp=2", "dp_shard=2 tp=2 mb=4"])
def test_collectives_of_all_layers_are_freed_by_each(strategy):
    few, all_layers = reserved(
        residual_layers(12, scaled=True), strategy, changed=in_sequence_parallelism
    )
    assert few == all_layers > 0


def test_nothing_is_reserved_without_a_cache():
    assert reserved(residual_layers(12), "dp_shard=4", machine=preset("4xcpu")) == (0, 0)


def leaves(*homes):
    """Leaves of few layers, of which three were left out; each home is a layer and a position."""
    layers = {f"{number}.{at}": Layer(0, number, at) for number, at in homes}
    return ["last", *layers, "first"], FoldedGraph(None, layers, (3,), {})


def test_leaves_that_are_left_out_are_between_those_beside_the_gap():
    names, folded = leaves((1, 0), (1, 1), (0, 0), (0, 1), (-1, 0), (-1, 1), (-2, 0), (-2, 1))
    assert whole_order(names, folded) == [*names[:5], *["0.0", "0.1"] * 3, *names[5:]]


@pytest.mark.parametrize(
    "homes", [[(0, 0), (0, 1), (-1, 1), (-1, 0)], [(0, 0), (-1, 0), (0, 1), (-1, 1)]]
)
def test_leaves_in_no_order_of_layers_stand_for_no_others(homes):
    with pytest.raises(NotPeriodicError):
        whole_order(*leaves(*homes))
