"""Lets copies of gradients to the host overlap with operators.

They are waited for, and added up there, when the next gradients have started to leave: so at most
those of two regions or buckets are on the device besides.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.program.step.host_copies import StoreGradient
from shardwright.program.step.instructions import Accumulate, StepInstruction, Wait
from shardwright.program.step.step_program import StepProgram


def overlap_stores(program: StepProgram) -> StepProgram:
    """`program` with late waits for gradients in flight to the host, and late sums there."""
    stored = {one.handle: one for one in program.host_copies() if isinstance(one, StoreGradient)}
    results = {one.result for one in stored.values()}
    found: list[StepInstruction] = []
    behind: list[list[StepInstruction]] = []  # of each group that has started
    together = False
    for one in program.instructions:
        if isinstance(one, StoreGradient):
            if not together:
                behind.append([])
            together = True
        elif (isinstance(one, Wait) and one.handle in stored) or (
            isinstance(one, Accumulate) and one.value in results
        ):
            behind[-1].append(one)
            continue
        else:
            together = False
            while len(behind) > 1:
                found += behind.pop(0)
        found.append(one)
    found += [one for group in behind for one in group]
    return replace(program, instructions=tuple(found))
