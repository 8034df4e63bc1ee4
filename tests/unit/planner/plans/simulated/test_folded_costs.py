"""Costs that follow from few layers equal those of the whole program."""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.options.optimizers import placed
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.plans.simulated.folded_costs import FoldedCosts
from shardwright.planner.plans.simulated.memory_refinement import (
    MemoryRefinement,
    ranks_that_differ,
)
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.folding.sections import NotPeriodicError, sections_of
from shardwright.program.step.instructions import Wait
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import analyze
from shardwright.simulate.memory.step.rank_step import StepSimulation, Trainer
from shardwright.simulate.time import stages
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import in_sequence_parallelism, residual_layers
from tests.harness.rotation import rotating

GRAPH = residual_layers(9)
ANALYSIS = analyze(GRAPH)
MACHINE = replace(preset("4xH100"), overlap=0.6, arrival_skew_seconds=20e-6)


def test_time_and_memory_equal_those_of_the_whole_program():
    tracer, folded = Footprints(on_cpu=False), 0
    costs = FoldedCosts(GRAPH, ANALYSIS, MACHINE)
    memories = MemoryRefinement(MACHINE, "adamw", tracer)
    for count in (1, 4):
        options = PlanOptions.of(meshes=[Mesh.parse("dp=4")], micro_batches=(count,))
        found = search(GRAPH, MACHINE, options)
        for plan in (found[0], found[-1], *found.baselines):
            decisions = read_plan(plan, GRAPH, ANALYSIS)
            seconds = costs.seconds(plan, decisions)
            if seconds is None:
                continue
            folded += 1
            lowering = PlanLowering(GRAPH, ANALYSIS, decisions, None)
            bare = replace(plan, timeline=None, memory=None)
            whole = memories.settled(
                TimeRefinement(GRAPH, MACHINE).refined(bare, lowering), lowering
            )
            assert seconds == pytest.approx(whole.step_seconds, rel=1e-9)
            peak = costs.peak(plan, decisions, memories.trainer(decisions), tracer)
            assert peak is None or peak.bytes == whole.peak_bytes
    assert folded >= 2


class LargeUpdate(Trainer):
    """An optimizer whose update needs more memory than everything else."""

    def update(self, tiles, group_bytes):
        return 2**36


@pytest.mark.parametrize("strategy", ["tp=4", "dp_shard=2 tp=2", "dp_shard=2 tp=2 mb=4"])
def test_strategies_fold_although_all_layers_share_sums(strategy):
    graph = residual_layers(8, scaled=True)
    expansion = Expansion(graph, MACHINE, "adamw")
    analysis = expansion.sources.analysis
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    plan = in_sequence_parallelism(plan)
    decisions = read_plan(plan, graph, analysis)
    tracer = Footprints(on_cpu=False)
    whole = Refinement(graph, MACHINE, "adamw", tracer, analysis).settled(plan)
    memories = MemoryRefinement(MACHINE, "adamw", tracer)
    costs = FoldedCosts(graph, analysis, MACHINE)
    assert costs.seconds(plan, decisions) == pytest.approx(whole.step_seconds, rel=1e-9)
    peak = costs.peak(plan, decisions, memories.trainer(decisions), tracer)
    assert peak.bytes == whole.peak_bytes
    lowering = PlanLowering(graph, analysis, decisions, MACHINE.backend_spec.alone_bytes)
    sums = list(lowering.program(0).transfers())
    assert max(sum(".scale" in part.value for part in one.parts) for one in sums) == 8
    # With the peak at the end, where copies of what layers were left out share a sum.
    known = memories.trainer(decisions)
    late = LargeUpdate(known.optimizer, known.rank)
    peaks = [
        StepSimulation(lowering, rank, late, tracer).memory().peak
        for rank in ranks_that_differ(lowering)
    ]
    assert costs.peak(plan, decisions, late, tracer).bytes == max(peaks)


@pytest.mark.parametrize(
    "strategy", ["dp_shard=4", "tp=4", "dp_shard=4 mb=4", "tp=4 offload=optimizer"]
)
def test_strategies_fold_although_gradients_of_all_layers_add_up(strategy):
    graph, like = residual_layers(12, masks=1, learned=True), Strategy.parse(strategy)
    expansion = Expansion(graph, MACHINE, placed("adamw", like.offload))
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    plan = expansion.expanded(like).plan(0.0, ())
    decisions = read_plan(plan, graph, analysis)
    whole = Refinement(graph, MACHINE, "adamw", tracer, analysis).settled(plan)
    costs = FoldedCosts(graph, analysis, MACHINE)
    assert costs.seconds(plan, decisions) == pytest.approx(whole.step_seconds, rel=1e-9)
    trainer = MemoryRefinement(MACHINE, "adamw", tracer).trainer(decisions)
    assert costs.peak(plan, decisions, trainer, tracer).bytes == whole.peak_bytes


def test_a_sum_that_is_several_with_all_layers_does_not_stand_for_them():
    graph = residual_layers(30, inner=lambda _: 64)  # seven layers in a bucket
    expansion = Expansion(graph, MACHINE, "adamw")
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    plan = expansion.expanded(Strategy.parse("dp_shard=2 tp=2")).plan(0.0, ())
    refinement = Refinement(graph, MACHINE, "adamw", tracer, analysis)
    seconds, peak = refinement.seconds(plan), refinement.peak(plan)
    shown = refinement.settled(plan)
    assert seconds == pytest.approx(shown.step_seconds, rel=1e-9)
    assert peak == shown.peak_bytes


def test_plans_are_compared_by_the_costs_that_they_are_shown_with():
    options = PlanOptions.of(meshes=[Mesh.parse("dp=4")], micro_batches=(1,))
    found = search(GRAPH, MACHINE, options)
    refinement = Refinement(GRAPH, MACHINE, "adamw", Footprints(on_cpu=False), ANALYSIS)
    plan = found[0]
    compared = refinement.compared(plan)
    assert compared.timeline is None and compared.memory is None
    shown = refinement.settled(compared)
    assert shown.timeline is not None and shown.memory is not None
    assert compared.step_seconds == pytest.approx(shown.step_seconds, rel=1e-9)
    assert compared.peak_bytes == shown.peak_bytes
    assert refinement.compared(plan) is refinement.settled(plan) is shown


def test_plans_that_gather_further_ahead_have_costs_of_their_own():
    expansion = Expansion(GRAPH, MACHINE, "adamw")
    plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
    costs, tracer = FoldedCosts(GRAPH, ANALYSIS, MACHINE), Footprints(on_cpu=False)
    memories, peaks = MemoryRefinement(MACHINE, "adamw", tracer), []
    for ahead in (1, 3):
        deep = replace(plan, ahead=ahead)
        decisions = read_plan(deep, GRAPH, ANALYSIS)
        trainer = memories.trainer(decisions)
        whole = StepSimulation(
            PlanLowering(GRAPH, ANALYSIS, decisions, None), 0, trainer, tracer
        ).memory()
        found = costs.peak(deep, decisions, trainer, tracer)
        assert found is None or found.bytes == whole.peak
        peaks.append(whole.peak)
    assert peaks[0] < peaks[1]


def assert_folds(graph, expansion, plan):
    """Few layers give the time of the whole program."""
    analysis = expansion.sources.analysis
    decisions = read_plan(plan, graph, analysis)
    lowering = PlanLowering(graph, analysis, decisions, None)
    whole = TimeRefinement(graph, MACHINE).refined(plan, lowering)
    found = FoldedCosts(graph, analysis, MACHINE).seconds(plan, decisions)
    assert found == pytest.approx(whole.step_seconds, rel=1e-9)


def test_layers_of_two_kinds_fold_with_many_buckets_ahead():
    graph = residual_layers(28)
    expansion = Expansion(graph, MACHINE, "adamw")
    plan = expansion.expanded(Strategy.parse("dp_shard=4 ac=every(2)")).plan(0.0, ())
    assert_folds(graph, expansion, replace(plan, ahead=8))


def test_layers_that_draw_random_numbers_fold():
    """Their regions differ in the numbers of their draws, and in nothing else."""
    ops = [
        replace(op, target="shardwright.dropout.default", args=(*op.args, 0.1, number))
        if op.kind == "relu"
        else op
        for number, op in enumerate(GRAPH.ops)
    ]
    graph = replace(GRAPH, ops=tuple(ops))
    expansion = Expansion(graph, MACHINE, "adamw")
    plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
    assert_folds(graph, expansion, plan)


def test_buffers_of_gradients_are_whole_where_parameters_are_gathered():
    expansion = Expansion(GRAPH, MACHINE, "adamw")
    plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
    decisions = read_plan(plan, GRAPH, ANALYSIS)
    lowering, tracer = PlanLowering(GRAPH, ANALYSIS, decisions, None), Footprints(on_cpu=False)
    trainer = MemoryRefinement(MACHINE, "adamw", tracer).trainer(decisions)
    kept = replace(trainer, optimizer=replace(trainer.optimizer, keeps_gradients=True))
    step, program = StepSimulation(lowering, 0, kept, tracer), lowering.program(0)
    weights = [leaf.name for leaf in GRAPH.leaves_of(LeafKind.PARAMETER)]
    assert step.summed_bytes(program, step.leaves(program.leaves)) == {
        name: GRAPH.tensor[name].bytes for name in weights
    }
    plain, buffered = (StepSimulation(lowering, 0, one, tracer).memory() for one in (trainer, kept))
    assert buffered.peak > plain.peak + sum(GRAPH.tensor[name].bytes for name in weights) / 4


STAGED = residual_layers(20)


def kinds_of_pipeline(case):
    """Its axes, its schedule with the stages of a group, what else it says, and contention."""
    return [word for word in case[0].split() if not word.startswith("mb=")] + [case[1]]


@pytest.mark.parametrize(
    ("strategy", "contention"),
    rotating(
        [
            ("pp=2 dp_shard=2 mb=4", 0.5),
            ("pp=2 dp_shard=2 mb=16", 0.0),  # whose passes repeat in pairs
            ("pp=2 dp_shard=2 mb=32", 0.0),
            ("pp=2 tp=2 mb=8", 0.5),
            ("pp=4 mb=16", 0.5),  # of stages with few layers only the passes repeat
            ("pp=2:Interleaved1F1B/v2 tp=2 mb=16", 0.5),
            ("pp=2:Interleaved1F1B/v3 dp_shard=2 mb=32", 0.0),
            ("pp=2:Interleaved1F1B/v2 dp_replicate=2 mb=32 sync=last", 0.5),
            ("pp=4:Interleaved1F1B/v2 mb=32", 0.5),
            ("pp=2:InterleavedZeroBubble dp_shard=2 mb=16", 0.5),
            ("pp=2:InterleavedZeroBubble/v2 tp=2 mb=16", 0.0),
            ("pp=4:ZBVZeroBubble/v2 mb=16", 0.5),
            ("pp=2:ZBVZeroBubble/v2 dp_shard=2 mb=16", 0.0),
            ("pp=2 dp_shard=2 mb=16 order=dp_replicate,dp_shard,pp,cp,tp", 0.5),
        ],
        3,
        kinds=kinds_of_pipeline,
    ),
)
def test_pipelines_fold(strategy, contention):
    machine = replace(MACHINE, contention=contention)
    # A fused update has no groups, which memory would decide.
    expansion = Expansion(STAGED, machine, "adamw_fused")
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    decisions = read_plan(plan, STAGED, analysis)
    lowering = PlanLowering(STAGED, analysis, decisions, None)
    whole = TimeRefinement(STAGED, machine).refined(plan, lowering)
    costs = FoldedCosts(STAGED, analysis, machine)
    assert costs.seconds(plan, decisions) == pytest.approx(whole.step_seconds, rel=1e-9)
    trainer = MemoryRefinement(machine, "adamw_fused", tracer).trainer(decisions)
    ranks = ranks_that_differ(lowering)
    memories = [StepSimulation(lowering, rank, trainer, tracer).memory() for rank in ranks]
    worst = max(memories, key=lambda memory: memory.peak)
    assert costs.peak(plan, decisions, trainer, tracer) == (worst.rank, worst.peak)
    shown = Refinement(STAGED, machine, "adamw_fused", tracer, analysis).settled(plan)
    assert shown.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert shown.memory.parts() == worst.parts() and shown.memory.shares == worst.shares
    # Of a cache that many micro-batches fragment a segment of 2 MiB more or less.
    reserved = worst.reserved + machine.device.workspace_bytes
    assert shown.memory.reserved == pytest.approx(reserved, abs=2 * 2**20)
    # Few micro-batches are lowered, and the timeline has all of them, by their numbers.
    assert len(shown.timeline.tasks) == len(whole.timeline.tasks)
    assert {task.name for task in shown.timeline.tasks} == {
        task.name for task in whole.timeline.tasks
    }


def test_cycles_of_passes_that_repeat_in_pairs_are_not_all_played(monkeypatch):
    played = []
    repeated = stages._repeated

    def recorded(parts, repeats, cycles=None):
        played.append((repeats[0].times, cycles))
        return repeated(parts, repeats, cycles)

    monkeypatch.setattr(stages, "_repeated", recorded)
    expansion = Expansion(STAGED, replace(MACHINE, contention=0.0), "adamw")
    plan = expansion.expanded(Strategy.parse("pp=2 dp_shard=2 mb=32")).plan(0.0, ())
    decisions = read_plan(plan, STAGED, expansion.sources.analysis)
    costs = FoldedCosts(STAGED, expansion.sources.analysis, expansion.machine)
    assert costs.seconds(plan, decisions)
    times, cycles = played[-1]
    assert cycles is not None and cycles < times / 2


def test_a_bucket_of_two_neighbours_is_not_one_of_all_layers(monkeypatch):
    """Its parts are of both layers beside a gap, and the layer behind it waits for it."""
    graph, found = residual_layers(8, scaled=True), []

    def kept(program, folded):
        found.append((program, folded))
        return sections_of(program, folded)

    monkeypatch.setattr("shardwright.planner.plans.simulated.folded_costs.sections_of", kept)
    expansion = Expansion(graph, MACHINE, "adamw")
    plan = expansion.expanded(Strategy.parse("tp=4")).plan(0.0, ())
    plan = in_sequence_parallelism(plan)
    analysis = expansion.sources.analysis
    costs = FoldedCosts(graph, analysis, MACHINE)
    assert costs.seconds(plan, read_plan(plan, graph, analysis)) is not None
    program, folded = found[-1]
    instructions, spans = list(program.instructions), sections_of(program, folded).spans
    at = next(at for at in spans if isinstance(instructions[at], Wait))
    instructions[at] = replace(instructions[at], results=instructions[at].results[:1])
    with pytest.raises(NotPeriodicError, match="is waited for by one layer"):
        sections_of(replace(program, instructions=tuple(instructions)), folded)


def test_programs_with_state_on_the_host_are_not_those_without():
    graph, costs = residual_layers(12), None
    expansion = Expansion(graph, MACHINE, "adamw")
    analysis, tracer = expansion.sources.analysis, Footprints(on_cpu=False)
    plan = expansion.expanded(Strategy.parse("dp_shard=4")).plan(0.0, ())
    refinement = Refinement(graph, MACHINE, "adamw", tracer, analysis)
    for one in (plan, replace(plan, offload=("optimizer",), update_group_bytes=2**22)):
        whole = Refinement(graph, MACHINE, "adamw", tracer, analysis).settled(one)
        found = refinement.compared(one)
        assert found.peak_bytes == whole.peak_bytes
        assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
        assert costs is None or (costs[0] < whole.step_seconds and costs[1] > whole.peak_bytes)
        costs = whole.step_seconds, whole.peak_bytes
