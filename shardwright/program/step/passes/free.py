"""Frees values after their last reader."""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.instructions import Free, StepInstruction, reads, writes
from shardwright.program.step.step_program import StepProgram


def free(program: StepProgram) -> StepProgram:
    """`program` with a `Free` after the last reader of each value that is not returned."""
    returned, seen = set(program.returned), set[str]()
    kept = set(program.leaves)
    found: list[StepInstruction] = []
    for one in reversed(program.instructions):
        names = dict.fromkeys((*reads(one), *writes(one)))
        last = tuple(n for n in names if n not in seen and n not in returned and n not in kept)
        seen.update(last)
        if last:
            found.append(Free(last))
        found.append(one)
    return replace(program, instructions=tuple(found[::-1]))
