"""The passes that make a naive step program fast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.ir.graph import VerifyError
from shardwright.program.step.dead_code import without_update
from shardwright.program.step.instructions import StepInstruction
from shardwright.program.step.passes.accumulate import accumulate
from shardwright.program.step.passes.bucket import bucket
from shardwright.program.step.passes.delay_waits import delay_waits
from shardwright.program.step.passes.fetch_parameters import fetch_gathered, fetch_read
from shardwright.program.step.passes.free import free
from shardwright.program.step.passes.fuse import fuse
from shardwright.program.step.passes.late_results import late_results
from shardwright.program.step.passes.overlap_copies import overlap_copies
from shardwright.program.step.passes.overlap_stores import overlap_stores
from shardwright.program.step.passes.overlap_sums import overlap_sums
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.passes.receive_early import receive_early
from shardwright.program.step.passes.separate_gathers import separate_gathers
from shardwright.program.step.step_program import StepProgram
from shardwright.program.step.verify import verify

Pass = Callable[[StepProgram], StepProgram]

# All regions are what they will be after these.
_REGIONS: tuple[Pass, ...] = (overlap_sums, bucket, fetch_read, fuse)
_ORDER: tuple[Pass, ...] = (
    *(accumulate, prefetch, receive_early, delay_waits, separate_gathers),
    *(fetch_gathered, overlap_stores, overlap_copies, free),
)
PASSES: tuple[Pass, ...] = (*_REGIONS, *_ORDER)
# The same for a step whose results nobody reads before its end.
STEP_PASSES: tuple[Pass, ...] = (*_REGIONS, late_results, *_ORDER)


class Prepared(NamedTuple):
    """A program after the passes before `prefetch`, which do not depend on `StepProgram.ahead`.

    Attributes:
        start: the program before all passes, without its update.
        found: the program after the first passes.
        update: the instructions of the update.
        passes: all passes.
        done: how many passes are done.
    """

    start: StepProgram
    found: StepProgram
    update: tuple[StepInstruction, ...]
    passes: Sequence[Pass]
    done: int

    def finished(self, ahead: int) -> StepProgram:
        """The program after all passes, with parameters gathered so many buckets ahead."""
        found = replace(self.found, ahead=ahead)
        for one in self.passes[self.done :]:
            found = one(found)
        names = tuple(one.__name__ for one in self.passes)
        found = replace(found, instructions=(*found.instructions, *self.update), passes=names)
        try:
            verify(found)
        except VerifyError:
            _blame(replace(self.start, ahead=ahead), self.passes)
            raise
        return found


def prepared(program: StepProgram, passes: Sequence[Pass] = PASSES) -> Prepared:
    """`program` after the passes that do not depend on how far ahead parameters are gathered.

    No pass sees the update: it stays after everything.
    """
    verify(program)
    start = without_update(program)
    update = program.instructions[len(start.instructions) :]
    done = passes.index(prefetch) if prefetch in passes else len(passes)
    found = start
    for one in passes[:done]:
        found = one(found)
    return Prepared(start, found, update, passes, done)


def optimized(program: StepProgram, passes: Sequence[Pass] = PASSES) -> StepProgram:
    """`program` after all passes; raises `VerifyError` that names a pass with a wrong result."""
    return prepared(program, passes).finished(program.ahead)


def _blame(program: StepProgram, passes: Sequence[Pass]) -> None:
    """Raise `VerifyError` naming the first pass that leaves a program that cannot run."""
    for one in passes:
        program = one(program)
        try:
            verify(program)
        except VerifyError as e:
            raise VerifyError(f"after the pass {one.__name__}: {e}") from e
