"""What is done to a program before it runs: the same numbers, at less cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.ir.graph import Graph, VerifyError
from shardwright.lower.buckets import bucketed
from shardwright.lower.gathers import gathered
from shardwright.lower.inplace import in_place
from shardwright.lower.lower import verify
from shardwright.lower.masters import with_casts
from shardwright.lower.program import Program

# A pipeline reduces gradients at the end of a step, so it gains nothing from buckets.
STAGE_PASSES: tuple[Callable[[Program, Graph], Program], ...] = (in_place, with_casts)
PASSES: tuple[Callable[[Program, Graph], Program], ...] = (in_place, bucketed, with_casts)
# Of a program that takes its batch as a whole: one of micro-batches runs more than once a step.
RANK_PASSES = (*PASSES, gathered)


def prepared(
    program: Program,
    graph: Graph,
    passes: Sequence[Callable[[Program, Graph], Program]] = PASSES,
) -> Program:
    """`program` after all passes; raises `VerifyError` naming a pass that broke it."""
    for rewrite in passes:
        program = rewrite(program, graph)
        try:
            verify(program)
        except VerifyError as e:
            raise VerifyError(f"after {rewrite.__name__}: {e}") from e
    return program
