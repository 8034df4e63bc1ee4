"""Computes time and memory of a plan from the step program of a few of its equal layers.

They equal those of the whole program: the costs of omitted layers follow from the remaining ones if
these run in the same way (`program/step/folding/sections.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TypeVar, final

from shardwright.ir.buckets import sum_bucket_bytes
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.machine.model import Machine
from shardwright.planner.plans.simulated.memory_refinement import RankPeak, ranks_that_differ
from shardwright.planner.plans.simulated.repeated_layers import Remaining, RepeatedLayers
from shardwright.program.decisions import Decisions
from shardwright.program.step.folding.sections import (
    FoldedGraph,
    NeverPeriodicError,
    NotPeriodicError,
    Sections,
    sections_of,
)
from shardwright.program.step.folding.steady_passes import few_micro_batches
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, SplitBatch, micro_batches
from shardwright.simulate.memory.step.folded_step import FoldedStep
from shardwright.simulate.memory.step.rank_step import Trainer
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.stages import stages_seconds
from shardwright.simulate.time.steady_state import SteadyStateError
from shardwright.simulate.time.step_seconds import step_seconds

_Cost = TypeVar("_Cost")
KEPT = 32  # programs of few layers
# Copies that count as one layer, 2 if layers of two kinds alternate or share buckets, and how many
# layers remain on each side of a gap, by the least number of buckets ahead. What is in flight from
# other layers ends that far away; fewer remain only where these are most of the model.
_NEAR, _BY_THREE = (Remaining(1, 3), Remaining(1, 4)), Remaining(3, 2)
_WAYS = {
    8: (Remaining(1, 6), Remaining(1, 4), Remaining(2, 4), Remaining(2, 2), _BY_THREE),
    4: (*_NEAR[1:], _NEAR[0], Remaining(1, 2), Remaining(2, 4), Remaining(2, 2), _BY_THREE),
    0: (*_NEAR, Remaining(1, 2), Remaining(2, 2), Remaining(2, 4), _BY_THREE),
}
_ALL = Remaining(0, 0)  # no layer is left out
_MOST_KEPT = 0.7  # the largest fraction of all operators in few layers


@final
class FoldedCosts:
    """Computes time and memory of plans of `graph` on `machine` from a few of their layers.

    The programs of few layers of the latest `kept` plans are used again for plans that differ
    elsewhere only. `split` is as in `PlanLowering`.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        machine: Machine,
        kept: int = KEPT,
        split: SplitBatch | None = None,
    ) -> None:
        self._split_whole = split
        self.graph, self.analysis, self.machine, self.kept = graph, analysis, machine, kept
        self._layers = RepeatedLayers(graph)
        self._whole = FoldedGraph(graph, {}, (), {})  # with all its layers
        self._splits: dict[tuple[int, int], tuple[FoldedGraph, MicroBatches]] = {}
        self._worked: dict[Hashable, Remaining] = {}  # the last way that worked, by kind of plan
        # The last plan, and its programs with few layers.
        self._last: tuple[Plan, dict[Remaining, _FoldedPlan | None]] | None = None
        # Programs of the latest plans, by what decides them and by the number of buckets ahead.
        self._known: OrderedDict[Hashable, dict[int, _FoldedPlan]] = OrderedDict()

    def seconds(self, plan: Plan, decisions: Decisions) -> Seconds | None:
        """Seconds of a step; None if only the whole program determines them."""

        def seconds(folded: _FoldedPlan) -> Seconds:
            prices = prices_of(plan, folded.folded.graph, self.machine)
            prices = replace(prices, update=prices.update.standing_for(folded.folded.stands_for))
            if plan.pipeline is None:
                return step_seconds(folded.sections(0), prices, plan.micro_batches)
            ranks = plan.stage_ranks
            groups = [folded.sections(ranks.rank(group, 0)) for group in range(ranks.groups)]
            repeats = folded.lowering.repeats([one.program for one in groups])
            return stages_seconds(groups, [prices] * len(groups), repeats)

        return self._first(plan, decisions, seconds)

    def peak(
        self, plan: Plan, decisions: Decisions, trainer: Trainer, tracer: OpTracer
    ) -> RankPeak | None:
        """The rank that needs most memory; None if only the whole program determines it."""

        return self._first(plan, decisions, lambda folded: folded.peak(self.graph, trainer, tracer))

    def reserved(
        self, plan: Plan, decisions: Decisions, trainer: Trainer, tracer: OpTracer, rank: int
    ) -> Bytes | None:
        """Bytes that torch's allocator reserves on a rank; None if only the whole program tells."""

        def reserved(folded: _FoldedPlan) -> Bytes | None:
            return folded.step(self.graph, trainer, tracer, rank).reserved(folded.sections(rank))

        return None if plan.pipeline is not None else self._first(plan, decisions, reserved)

    def few_micro_batches(self, plan: Plan, decisions: Decisions) -> PlanLowering | None:
        """The lowering of few micro-batches of a pipeline with all layers; None if all are few."""
        folded = self._known_of(plan, decisions, _ALL)
        return None if folded is None else folded.lowering

    def _first(
        self, plan: Plan, decisions: Decisions, cost: Callable[[_FoldedPlan], _Cost]
    ) -> _Cost | None:
        """The cost from the first few layers with which the omitted ones run like the others."""
        if plan.is_asynchronous:
            return None
        failed: dict[int, int] = {}  # the most layers by width; fewer do no better
        never = False
        ways = next(ways for least, ways in _WAYS.items() if plan.ahead >= least)
        kind = (
            ways,
            plan.layout_mesh.shape,
            plan.micro_batches,
            plan.stages,
            any(decisions.segments.values()),
        )
        likely = self._worked.get(kind)
        for way in (*([likely] if likely else []), *ways, _ALL):
            more = way.layers > failed.get(way.width, -1) and (way == _BY_THREE or not never)
            folded = self._known_of(plan, decisions, way) if more else None
            if folded is None:
                continue
            try:
                found = cost(folded)
            except NeverPeriodicError:
                never = True  # unless what seems a bucket of all layers is one of three
            except (NotPeriodicError, SteadyStateError):
                failed[way.width] = way.layers
            else:
                if way != _ALL:
                    self._worked[kind] = way
                return found
        return None

    def _known_of(self, plan: Plan, decisions: Decisions, way: Remaining) -> _FoldedPlan | None:
        """The program of few layers; those of the last plan are kept."""
        if self._last is None or self._last[0] is not plan:
            self._last = plan, {}
        known = self._last[1]
        if way not in known:
            known[way] = self._folded(plan, decisions, way)
        return known[way]

    def _folded(self, plan: Plan, decisions: Decisions, way: Remaining) -> _FoldedPlan | None:
        if way != _ALL:
            folded = self._layers.folded(plan, decisions, way)
            many = _MOST_KEPT * len(self.graph.ops)
            if folded is not None and plan.pipeline is None and len(folded.graph.ops) > many:
                return None  # lowering them takes about as long as lowering all
        else:
            count, pipeline = decisions.micro_batches, decisions.pipeline
            some = pipeline is not None and few_micro_batches(pipeline, count) is not None
            folded = self._whole if some else None
        if folded is None:
            return None
        few = _of_graph(decisions, folded.graph)
        key = (
            *(
                id(folded),
                few.mesh,
                few.micro_batches,
                few.pipeline,
                few.gradient_sync,
                few.offloaded,
                few.update,
            ),
            *(tuple(few.tilings.values()), tuple(few.storage.values()), few.regathered),
            *(tuple(few.segments.values()), few.kept),
        )
        same = self._known.setdefault(key, {})
        self._known.move_to_end(key)
        if few.ahead not in same:
            same[few.ahead] = _FoldedPlan(folded, self._lowering(folded, few, same.values()))
            while len(self._known) > 1 and sum(map(len, self._known.values())) > self.kept:
                self._known.popitem(last=False)
        return same[few.ahead]

    def _lowering(
        self, folded: FoldedGraph, few: Decisions, same: Iterable[_FoldedPlan]
    ) -> PlanLowering:
        """The lowering of few layers; `same` differ in the number of buckets ahead alone."""
        for other in same:
            return other.lowering.with_ahead(few.ahead)
        alone_bytes = self.machine.backend_spec.alone_bytes
        sum_bytes = sum_bucket_bytes(self.graph)
        given = folded.graph, self.analysis, few, alone_bytes, self._split(folded), sum_bytes
        return PlanLowering(*given, few=True)

    def _split(self, folded: FoldedGraph) -> SplitBatch:
        """The micro-batch split of a graph of few layers, shared by plans of equal counts."""
        graph = folded.graph
        if folded is self._whole and self._split_whole is not None:
            return self._split_whole

        def split(count: int) -> MicroBatches:
            key = id(folded), count
            if key not in self._splits:
                self._splits[key] = folded, micro_batches(graph, self.analysis, count)
            return self._splits[key][1]

        return split


def _of_graph(decisions: Decisions, graph: Graph) -> Decisions:
    """The decisions about a part of a graph."""
    ops = [op.name for op in graph.ops]
    parameters = [leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)]
    return replace(
        decisions,
        tilings={name: decisions.tilings[name] for name in ops},
        storage={name: decisions.storage[name] for name in parameters},
        regathered=decisions.regathered.intersection(parameters),
        segments={name: decisions.segments[name] for name in ops if name in decisions.segments},
        kept=decisions.kept.intersection(ops),
    )


@final
class _FoldedPlan:
    """A plan of the graph `folded`, which has only a few of many equal layers."""

    def __init__(self, folded: FoldedGraph, lowering: PlanLowering) -> None:
        self.folded, self.lowering = folded, lowering
        self._sections: dict[int, Sections | NotPeriodicError] = {}  # or why there are none
        self._peak: tuple[Trainer, RankPeak] | None = None

    def peak(self, whole: Graph, trainer: Trainer, tracer: OpTracer) -> RankPeak:
        """The rank that needs most in a step of the graph `whole`; raises `NotPeriodicError`."""
        if self._peak is None or self._peak[0] is not trainer:
            found = []
            for rank in ranks_that_differ(self.lowering):
                step = self.step(whole, trainer, tracer, rank)
                found.append(RankPeak(rank, step.peak(self.sections(rank))))
            self._peak = trainer, max(found, key=lambda one: one.bytes)
        return self._peak[1]

    def step(self, whole: Graph, trainer: Trainer, tracer: OpTracer, rank: int) -> FoldedStep:
        """The step of a rank, whose memory is simulated."""
        return FoldedStep(whole, self.folded, self.lowering, rank, trainer, tracer)

    def sections(self, rank: int) -> Sections:
        """The program of a rank in sections; raises `NotPeriodicError`."""
        if rank not in self._sections:
            program = self.lowering.program(rank)
            try:
                self._sections[rank] = sections_of(program, self.folded)
            except NotPeriodicError as e:
                self._sections[rank] = e
        found = self._sections[rank]
        if isinstance(found, NotPeriodicError):
            raise found
        return found
