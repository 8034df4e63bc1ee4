"""Lowers a plan for simulation: the step program of each rank that is asked for, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

from shardwright.ir.graph import Graph
from shardwright.ir.layout import chunk
from shardwright.program.decisions import Decisions
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.async_pipeline.stage_programs import stage_programs
from shardwright.program.step.folding.steady_passes import (
    FewMicroBatches,
    RepeatedPasses,
    few_micro_batches,
    steady_cycles,
)
from shardwright.program.step.lower.lowering import lower_step
from shardwright.program.step.lower.micro_batches import micro_batched_step
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.lower.whole_batch import whole_step
from shardwright.program.step.optimize import STEP_PASSES, Prepared, optimized, prepared
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, SplitBatch, batch_size, micro_batches


@final
class PlanLowering:
    """The programs of the ranks of one plan, lowered when they are asked for, and then kept.

    Micro-batches that do the same are lowered once. Without stages a program has some of these,
    which stand for all (`numbers`).

    Args:
        graph: the graph of the plan, with all layers or few.
        analysis: the analysis of `graph`, or of a graph that it is a part of.
        decisions: the decisions of the plan.
        alone_bytes: that of the backend (`BackendSpec`).
        split: splits the batch, to share what takes a while for each number of micro-batches.
        sum_bytes: the size of a bucket of gradients; None is that of `graph`.
        few: whether programs of pipelines leave out micro-batches, too.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        decisions: Decisions,
        alone_bytes: int | None,
        split: SplitBatch | None = None,
        sum_bytes: int | None = None,
        *,
        few: bool = False,
    ) -> None:
        self.graph, self.analysis, self.decisions = graph, analysis, decisions
        self._alone_bytes, self._sum_bytes, self._few = alone_bytes, sum_bytes, few
        self._split = split or (lambda count: micro_batches(graph, analysis, count))
        self._programs: dict[int, StepProgram] = {}
        self._prepared: dict[int, Prepared] = {}  # by rank

    def with_ahead(self, ahead: int) -> PlanLowering:
        """The lowering of the same plan with parameters gathered so many buckets ahead.

        Both share what does not depend on that.
        """
        other = PlanLowering(
            self.graph,
            self.analysis,
            replace(self.decisions, ahead=ahead),
            self._alone_bytes,
            self._split,
            self._sum_bytes,
            few=self._few,
        )
        other._prepared = self._prepared  # one dict: what either lowers, both have
        return other

    @cached_property
    def micro(self) -> MicroBatches:
        """The graph with its batch split into the plan's micro-batches."""
        return self._split(self.decisions.micro_batches)

    @cached_property
    def staged(self) -> StagedGraph:
        """The graph split into the plan's pipeline stages."""
        micro = None if self.decisions.micro_batches == 1 else self.micro
        return StagedGraph(self.graph, self.analysis, self.decisions, micro)

    @cached_property
    def first_equal(self) -> tuple[int, ...]:
        """For each micro-batch the first one that runs the same operators."""
        count = self.decisions.micro_batches
        if count == 1:
            return (0,)
        size = batch_size(self.graph, self.analysis)
        # Compiled regions that draw are each micro-batch's own, and terms are kept by the first.
        draws = self.graph.numerics.rng == "fast"
        first: dict[tuple[int, bool], int] = {}
        forms = ((chunk(size, count, n)[1], draws and n == 0) for n in range(count))
        return tuple(first.setdefault(form, n) for n, form in enumerate(forms))

    @cached_property
    def _few_of_all(self) -> FewMicroBatches | None:
        """The micro-batches of a pipeline that stand for all; None if none is left out."""
        pipeline, count = self.decisions.pipeline, self.decisions.micro_batches
        if not self._few or pipeline is None or set(self.first_equal) != {0}:
            return None
        return few_micro_batches(pipeline, count)

    @property
    def left_out(self) -> int:
        """The number of micro-batches of a pipeline that are left out: others stand for them."""
        few = self._few_of_all
        return 0 if few is None else self.decisions.micro_batches - few.count

    def repeat(self, group: int) -> RepeatedPasses | None:
        """The cycle of passes of a group that is repeated; None if no micro-batch is left out."""
        pipeline, few = self.decisions.pipeline, self._few_of_all
        if pipeline is None or few is None:
            return None
        return few.repeat(pipeline, group, self.decisions.micro_batches)

    def repeats(self, programs: Sequence[StepProgram]) -> list[RepeatedPasses] | None:
        """For each group the cycle of passes that is repeated; None if no micro-batch is left out.

        `programs` are those of the groups. Raises `NotPeriodicError` if the passes of the next
        cycle do not do the same.
        """
        found = []
        for group, program in enumerate(programs):
            repeat = self.repeat(group)
            if repeat is None:
                return None
            steady_cycles(program, repeat)
            found.append(repeat)
        return found

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The micro-batches in programs; the third of equal ones stands for the others.

        The second runs the same instructions but may need less memory: where it waits for gradients
        of the first, these become the totals, to which gradients of the second are added.
        """
        count = self.decisions.micro_batches
        if self.decisions.pipeline is not None:
            return tuple(range(count - self.left_out))
        firsts = set(self.first_equal)
        following = {n + i for n in firsts for i in (1, 2) if n + i < count}
        return tuple(sorted({*firsts, *following, count - 1}))

    def program(self, rank: int) -> StepProgram:
        """The step program of a rank, after all passes; of an asynchronous pipeline a call."""
        if rank not in self._programs:
            self._programs[rank] = self._lowered(rank)
        return self._programs[rank]

    def _lowered(self, rank: int) -> StepProgram:
        if self.decisions.pipeline is not None and self.staged.weights is not None:
            return stage_programs(self.staged, rank).call
        if rank not in self._prepared:
            self._prepared[rank] = self._before_prefetch(rank)
        return self._prepared[rank].finished(self.decisions.ahead)

    def _before_prefetch(self, rank: int) -> Prepared:
        if self.decisions.pipeline is not None:
            staged, same_as = self.staged, self.first_equal[: len(self.numbers)]
            program = lower_pipeline(
                staged, rank, in_place, same_as=same_as, sum_bytes=self._sum_bytes
            )
            return prepared(program)
        if self.decisions.micro_batches == 1:
            step = whole_step(self.graph, self.analysis, self.decisions, rank, in_place)
            step = replace(step, alone_bytes=self._alone_bytes, sum_bytes=self._sum_bytes)
            return prepared(lower_step(step), STEP_PASSES)
        return prepared(self._some_micro_batches(rank, self.numbers))

    def of_micro_batches(self, rank: int, numbers: Sequence[int]) -> StepProgram:
        """The program of a rank for some of the micro-batches of a plan without stages."""
        return optimized(self._some_micro_batches(rank, numbers))

    def _some_micro_batches(self, rank: int, numbers: Sequence[int]) -> StepProgram:
        """The program of a rank for some micro-batches before all passes."""
        firsts = sorted({self.first_equal[number] for number in numbers})
        graph, analysis, decisions = self.graph, self.analysis, self.decisions
        step = micro_batched_step(graph, analysis, self.micro, decisions, rank, in_place, firsts)
        known = dict(zip(firsts, step.programs, strict=True))
        programs = [known[self.first_equal[number]] for number in numbers]
        step = replace(
            step, programs=programs, alone_bytes=self._alone_bytes, sum_bytes=self._sum_bytes
        )
        return lower_step(step)
