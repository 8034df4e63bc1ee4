"""Seconds of steps of which equal layers and micro-batches are played only until they repeat."""

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.folded_costs import FoldedCosts
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.step_program import simulated
from shardwright.simulate.time.step_seconds import Clock, step_seconds
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(24)
STRATEGIES = ["dp_replicate=4", "dp_shard=4", "tp=4", "dp_shard=2 tp=2", "dp_shard=4 ac=full"]
PRESET = preset("4xH100")
EXPANSION = Expansion(GRAPH, PRESET, "adamw")
MACHINES = {
    "without overlap": PRESET,
    "with overlap": replace(PRESET, overlap=0.6, contention=0.5),
    "slow links": replace(
        PRESET, overlap=1.0, levels=tuple(replace(one, bytes_per_s=1e9) for one in PRESET.levels)
    ),
    "with stragglers": replace(PRESET, overlap=0.6, arrival_skew_seconds=20e-6),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("micro_batches", [1, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_and_micro_batches_take_the_seconds_of_the_timeline(
    strategy, micro_batches, machine, monkeypatch
):
    played = Counter()

    def keep(self, task, start):
        played["tasks"] += 1
        kept(self, task, start)

    kept = Clock.keep
    monkeypatch.setattr(Clock, "keep", keep)
    count = f" mb={micro_batches}" if micro_batches > 1 else ""
    plan = EXPANSION.expanded(Strategy.parse(strategy + count)).plan(0.0, ())
    machine, analysis = MACHINES[machine], EXPANSION.sources.analysis
    decisions = read_plan(plan, GRAPH, analysis)
    program = PlanLowering(GRAPH, analysis, decisions, None).program(0)
    prices = prices_of(plan, GRAPH, machine)
    whole = simulated(program, prices, 4, micro_batches)
    seconds = step_seconds(program, prices, micro_batches)
    assert seconds == pytest.approx(whole.seconds, rel=1e-12)
    played.clear()
    few = FoldedCosts(GRAPH, analysis, machine).seconds(plan, decisions)
    if few is None:
        assert (strategy, micro_batches) == ("dp_shard=2 tp=2", 16), "buckets end elsewhere"
        return
    assert few == pytest.approx(whole.seconds, rel=1e-9)
    if prices.late is None:
        part = 0.7 if micro_batches == 1 else 0.2
        assert played["tasks"] < part * len(whole.tasks)
