"""Optimisation passes over a program: equal results at lower cost.

The runtime and the memory simulation both use these passes, so that they see the same program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.ir.graph import Graph, VerifyError
from shardwright.program.instructions import Compute, Instruction, Program, RecomputedSegment
from shardwright.program.lower.inplace import in_place
from shardwright.program.lower.mixed_precision import with_casts
from shardwright.program.lower.rank_program import verify

Pass = Callable[[Program, Graph], Program]

# An asynchronous stage takes its batch as a whole and has its own reductions.
STAGE_PASSES: tuple[Pass, ...] = (in_place, with_casts)


def stage_program(program: Program, graph: Graph) -> Program:
    """The part of a pipeline stage's program that runs."""
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


def without_regathers(program: Program) -> Program:
    """`program` that keeps all copies of parameters for the backward pass."""

    def keeping(one: Instruction) -> Instruction:
        if isinstance(one, RecomputedSegment):
            return replace(one, instructions=tuple(map(keeping, one.instructions)))
        return replace(one, regathers=()) if isinstance(one, Compute) else one

    return replace(program, instructions=tuple(map(keeping, program.instructions)))
