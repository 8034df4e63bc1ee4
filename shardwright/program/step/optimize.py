"""The passes that make a naive step program fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwright.ir.graph import VerifyError
from shardwright.program.step.instructions import StepProgram
from shardwright.program.step.passes.accumulate import accumulate
from shardwright.program.step.passes.bucket import bucket
from shardwright.program.step.passes.delay_waits import delay_waits
from shardwright.program.step.passes.free import free
from shardwright.program.step.passes.fuse import fuse
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.passes.receive_early import receive_early
from shardwright.program.step.verify import verify

Pass = Callable[[StepProgram], StepProgram]

PASSES: tuple[Pass, ...] = (
    bucket,
    fuse,
    accumulate,
    prefetch,
    receive_early,
    delay_waits,
    free,
)


def optimized(program: StepProgram, passes: Sequence[Pass] = PASSES) -> StepProgram:
    """`program` after all passes; raises `VerifyError` naming a pass that broke it."""
    verify(program)
    for one in passes:
        program = one(program)
        try:
            verify(program)
        except VerifyError as e:
            raise VerifyError(f"after the pass {one.__name__}: {e}") from e
    return replace(program, passes=tuple(one.__name__ for one in passes))
