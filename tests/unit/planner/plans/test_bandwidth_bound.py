"""Bounds of step times hold for simulated steps, and are close where buckets are full."""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.bandwidth_bound import bandwidth_bound
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers

MACHINES = {
    "nothing hidden": preset("2x4xH100"),
    "most hidden": replace(preset("2x4xH100"), overlap=0.9, gather_overlap=0.5, contention=0.0),
    "skewed": replace(preset("2x4xH100"), overlap=0.2, arrival_skew_seconds=20e-6),
}
MESHES = ("dp=8", "dp=2 tp=4", "a=2 b=2 c=2")


@pytest.mark.parametrize("name", MACHINES)
def test_no_simulated_step_is_faster_than_its_bound(name):
    graph, machine, nearest = residual_layers(3, scaled=True), MACHINES[name], 0.0
    for mesh in map(Mesh.parse, MESHES):
        for count in (1, 2):
            options = PlanOptions.of(meshes=[mesh], micro_batches=(count,))
            found = search(graph, machine, options)
            for plan in (*found.baselines, found[0], found[-1]):
                least, seconds = (
                    bandwidth_bound(plan, graph, machine),
                    found.simulated_seconds(plan),
                )
                assert 0.2 * seconds < least <= seconds
                nearest = max(nearest, least / seconds)
    assert nearest > 0.9


STRATEGIES = ("dp_replicate=8", "dp_shard=8", "dp_shard=8 reshard=off", "dp_replicate=2 dp_shard=4")


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dp_shard=8 ac=full", "dp_shard=4 tp=2"])
def test_the_bound_is_close_for_strategies_whose_buckets_are_full(strategy):
    graph, machine = residual_layers(12), MACHINES["nothing hidden"]
    expansion = Expansion(graph, machine, "adamw")
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    given = graph, machine, "adamw", Footprints(on_cpu=False), expansion.sources.analysis
    refinement = Refinement(*given)
    least, seconds = refinement.least_seconds(plan), refinement.seconds(plan)
    assert (0.7 if "ac" in strategy else 0.78) * seconds < least <= seconds
    assert seconds == pytest.approx(refinement.compared(plan).step_seconds, rel=1e-9)
