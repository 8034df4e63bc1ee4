"""Lets backward passes add gradients of parameters to their totals.

Otherwise all gradients of a region would be alive at once, beside the totals.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.instructions import Accumulate, Backward, StepInstruction
from shardwright.program.step.lower.purposes import readers_of
from shardwright.program.step.step_program import StepProgram


def accumulate(program: StepProgram) -> StepProgram:
    """`program` without an `Accumulate` for gradients that a backward pass makes."""
    readers = readers_of(program.instructions)
    added = {one.value: one for one in program.instructions if isinstance(one, Accumulate)}
    gone: set[int] = set()
    found: list[StepInstruction] = []
    for one in program.instructions:
        if isinstance(one, Backward):
            made, totals = list(one.made), list(one.totals)
            for i, name in enumerate(one.made):
                if name in added and len(readers[name]) == 1:
                    made[i] = ""
                    totals.append((i, added[name].total))
                    gone.add(id(added[name]))
            one = replace(one, made=tuple(made), totals=tuple(totals))
        if id(one) not in gone:
            found.append(one)
    return replace(program, instructions=tuple(found))
