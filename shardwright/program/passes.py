"""Optimisation passes over a program: equal results at lower cost.

Who runs a program and who foretells its memory take it from here, so that it is the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.ir.graph import Graph, VerifyError
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Program
from shardwright.program.lower.buckets import bucketed
from shardwright.program.lower.gathers import gathered
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.mixed_precision import with_casts
from shardwright.program.lower.rank_program import lower, verify
from shardwright.program.lower.scalar_reductions import early_sums, late_sums
from shardwright.rules.analysis import Analysis

Pass = Callable[[Program, Graph], Program]

# An asynchronous stage takes its batch as a whole and has its own reductions.
STAGE_PASSES: tuple[Pass, ...] = (in_place, with_casts)
PASSES: tuple[Pass, ...] = (early_sums, late_sums, in_place, bucketed, with_casts)


def rank_program(graph: Graph, analysis: Analysis, decisions: Decisions, rank: int) -> Program:
    """What `rank` runs that takes its batch as a whole."""
    return _after((*PASSES, gathered), lower(graph, analysis, decisions, rank), graph)


def stage_program(program: Program, graph: Graph) -> Program:
    """What runs of the program of a pipeline stage."""
    return _after(STAGE_PASSES, program, graph)


def _after(passes: Sequence[Pass], program: Program, graph: Graph) -> Program:
    """`program` after all passes; raises `VerifyError` naming a pass that broke it."""
    for rewrite in passes:
        program = rewrite(program, graph)
        try:
            verify(program)
        except VerifyError as e:
            raise VerifyError(f"after {rewrite.__name__}: {e}") from e
    return program
