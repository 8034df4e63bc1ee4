"""Prepares the programs of all micro-batches for lowering to one step program."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.ir.graph import Graph
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Program
from shardwright.program.lower.micro_batches import lower_micro
from shardwright.program.lower.mixed_precision import with_casts
from shardwright.program.lower.rank_program import verify
from shardwright.program.lower.scalar_reductions import early_sums, late_sums
from shardwright.program.step.lower.step_builder import LoweringInput
from shardwright.program.step.lower.stretches import Rewrite
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches


def micro_batched_step(
    graph: Graph,
    analysis: Analysis,
    micro: MicroBatches,
    decisions: Decisions,
    rank: int,
    rewrite: Rewrite | None = None,
    numbers: Sequence[int] | None = None,
) -> LoweringInput:
    """The step of `rank`, whose regions are as `rewrite` leaves them.

    Of the micro-batches with these `numbers`; None is all of them.
    """
    lowered = lower_micro(graph, analysis, micro, decisions, rank, numbers)
    return LoweringInput(
        decisions.mesh,
        rank,
        graph,
        [prepared(program, graph) for program in lowered.programs],
        lowered.reductions,
        rewrite,
        fixed_offsets=graph.numerics.rng == "fast",
        ahead=decisions.ahead,
        offload=decisions.offloaded,
        update=decisions.update,
        separates_gathers=decisions.separates_gathers,
    )


def prepared(program: Program, graph: Graph) -> Program:
    """The program with deferred sums of scalars and with casts of parameters."""
    for rewrite in (early_sums, late_sums, with_casts):
        program = rewrite(program, graph)
    verify(program)
    return program
