"""Waits for sums of single numbers right before their first reader.

A number that the batch alone determines, such as that of valid labels, is summed while layers run.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.instructions import StepInstruction, StepProgram, Wait, reads


def overlap_sums(program: StepProgram) -> StepProgram:
    """`program` with late waits for transfers of nothing but single numbers."""
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
