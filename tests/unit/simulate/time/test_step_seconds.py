"""Seconds of steps of which equal layers and micro-batches are played only until they repeat."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from shardwright.ir.redistribution import Collective
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.instructions import Move
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.unrolled import Loop, Played
from shardwright.program.step.instructions import Forward, Part, Transfer, Wait
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.program.step.lower.purposes import Purpose
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.step_program import (
    OpSeconds,
    Player,
    StepPrices,
    TransferSeconds,
    simulated,
)
from shardwright.simulate.time.step_seconds import Clock, LoopPlayer, step_seconds
from shardwright.simulate.time.stragglers import at_a_wait
from shardwright.simulate.time.timeline import TaskSchedule
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(24)
STRATEGIES = ["dp_replicate=4", "dp_shard=4", "tp=4", "dp_shard=2 tp=2", "dp_shard=4 ac=full"]
PRESET = preset("4xH100")
EXPANSION = Expansion(GRAPH, PRESET, "adamw")
MACHINES = {
    "overlap": replace(PRESET, overlap=0.6, contention=0.5),
    "slow links": replace(
        PRESET, overlap=1.0, levels=tuple(replace(one, bytes_per_s=1e9) for one in PRESET.levels)
    ),
    "stragglers": replace(PRESET, overlap=0.6, arrival_skew_seconds=20e-6),
}
PART = Part(
    "x", "y", (4,), (), Move("dp", Collective.ALL_REDUCE, (4,), -1, -1, 0, 0, True), (4,), "float32"
)


@pytest.mark.parametrize(
    ("strategy", "machine"),
    [
        *((strategy, machine) for strategy in STRATEGIES for machine in ("overlap", "slow links")),
        *((strategy, "stragglers") for strategy in ("dp_shard=4", "tp=4")),
    ],
)
@pytest.mark.parametrize("micro_batches", [1, 16])
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
        part = 0.85 if micro_batches == 1 else 0.2
        assert played["tasks"] < part * len(whole.tasks)


def random_loop(rng, times):
    """Transfers before a loop, the loop, and the waits that it leaves.

    An iteration runs regions and starts transfers, each of which it or a later iteration waits for.
    """
    lags = [rng.choice([0, 0, 1, 2, None]) for _ in range(rng.randint(1, 4))]
    parts = [(i, what) for i in range(len(lags)) for what in ("start", "wait")]
    rng.shuffle(parts)
    body = []
    for i, what in parts:
        if what == "start":
            body.append((what, i))
            if lags[i] == 0:
                body.append(("run", f"op{rng.randint(0, 2)}"))
                body.append(("wait", i))
        elif lags[i]:
            body.append((what, i))
        if rng.random() < 0.5:
            body.append(("run", f"op{rng.randint(0, 2)}"))
    handles = [
        Transfer(Collective.ALL_REDUCE, rng.choice(("dp", "tp")), (PART,), f"t{i}")
        for i in range(len(lags))
    ]

    def played(number):
        for what, which in body:
            if what == "run":
                yield Played(Forward(0, 0, which, (), (), True, ops=(which,)))
            elif what == "start":
                yield Played(handles[which], (which, number))
            else:
                yield Played(Wait(f"t{which}", ()), (which, number - lags[which]))

    started = [i for what, i in body if what == "start"]
    before = [
        Played(handles[i], (i, -n)) for n in (2, 1) for i in started if lags[i] and lags[i] >= n
    ]
    loop = Loop(
        times,
        lambda number: list(played(number)),
        lambda number: [(i, number) for i in started],
        [lags[i] for i in started],
    )
    left = [
        Played(Wait(f"t{i}", ()), (i, n))
        for i in started
        for n in range(times)
        if lags[i] is None or n + lags[i] >= times
    ]
    return [*before, loop, *left], {f"t{i}": Purpose.GRADIENT for i in started}


@pytest.mark.parametrize("late", [None, partial(at_a_wait, MACHINES["stragglers"])])
def test_random_loops_take_as_long_as_all_their_iterations(late):
    rng, skipped = random.Random(0), 0
    for _ in range(300):
        order, kinds = random_loop(rng, 40)
        seconds = {f"op{i}": OpSeconds(rng.uniform(0, 2), 0.0) for i in range(3)}
        link, hidden = {name: rng.uniform(0, 3) for name in kinds}, rng.choice([0.0, 0.3, 0.7])
        prices = StepPrices(
            seconds,
            lambda one, link=link: TransferSeconds(link[one.handle], 0.1, 0.2),
            lambda one, _purpose, hidden=hidden: hidden if one.channel == "dp" else 0.7,
            {"dp": "dp", "tp": "tp"},
            partial(lambda part, _one, _other: part, rng.choice([0.0, 0.4])),
            late=late,
        )
        lost = [{}]
        for made in (TaskSchedule, Clock):
            player = Player if made is TaskSchedule else LoopPlayer
            first = player(kinds, prices, "", made(), {})
            first.play(order)
            if late is not None:
                lost.append(first.lost(late))
        if late is not None:
            assert lost[1] == pytest.approx(lost[2], rel=1e-9)
        whole = Player(kinds, prices, "", TaskSchedule(), lost[-1])
        whole.play(order)
        few = LoopPlayer(kinds, prices, "", Clock(), lost[-1])
        few.play(order)
        assert few.made.seconds == pytest.approx(whole.made.timeline.seconds, rel=1e-9)
        skipped += sum(few.made.counts.values()) < 0.5 * len(whole.made.tasks)
    assert skipped > (150 if late is None else 10)
