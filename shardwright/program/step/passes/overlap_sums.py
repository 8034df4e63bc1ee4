"""Delays waits for reductions of scalars until right before their first reader.

A scalar that depends only on the batch, e.g. the number of valid labels, is reduced while layers
run.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.instructions import StepInstruction, Wait, reads
from shardwright.program.step.step_program import StepProgram


def overlap_sums(program: StepProgram) -> StepProgram:
    """`program` with late waits for transfers that contain only scalars."""
    numbers = {
        one.handle for one in program.transfers() if all(part.shape == () for part in one.parts)
    }
    waiting: dict[str, Wait] = {}  # result -> the wait for it
    found: list[StepInstruction] = []
    for one in program.instructions:
        for name in reads(one):
            if name in waiting:
                wait = waiting[name]
                found.append(wait)
                for result in wait.results:
                    del waiting[result]
        if isinstance(one, Wait) and one.handle in numbers:
            waiting.update(dict.fromkeys(one.results, one))
        else:
            found.append(one)
    found += dict.fromkeys(waiting.values())
    return replace(program, instructions=tuple(found))
