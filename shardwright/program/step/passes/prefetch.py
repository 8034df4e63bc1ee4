"""Starts gathers of parameters ahead of their first reader.

The next bucket, or the next few, are gathered while operators read the one before, in the forward
pass, in the backward pass and across micro-batches (FSDP, arXiv 2304.11277, section 4.3). A gather
for the backward part is not started before the `Seed`, as the backward part may never be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.program.step.instructions import Seed, StepInstruction, Transfer, Wait, reads
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram


def prefetch(program: StepProgram) -> StepProgram:
    """`program` with each bucket of copies started when an earlier one arrives.

    `program.ahead` is how many buckets earlier that one is, at least 1.
    """
    at = next((i for i, one in enumerate(program.instructions) if isinstance(one, Seed)), 0)
    known = purposes(program)
    parts = program.instructions[:at], program.instructions[at:]
    instructions = [one for part in parts for one in _prefetched(part, program, known)]
    return replace(program, instructions=tuple(instructions))


def _prefetched(
    instructions: Sequence[StepInstruction],
    program: StepProgram,
    known: Mapping[str, Purpose],
) -> list[StepInstruction]:
    """One part of the program."""
    ahead = program.ahead
    leaves = set(program.leaves)
    waiting: list[str] = []  # handles of gathers, in the order in which they are waited for
    gathers: dict[str, Transfer] = {}
    for one in instructions:
        if isinstance(one, Transfer) and known[one.handle] is Purpose.COPY:
            if leaves.issuperset(reads(one)):
                gathers[one.handle] = one
        elif isinstance(one, Wait) and one.handle in gathers:
            waiting.append(one.handle)
    follows = dict(zip(waiting, waiting[ahead:], strict=False))
    found: list[StepInstruction] = []
    started: set[str] = set()
    for one in instructions:
        if isinstance(one, Transfer) and one.handle in gathers:
            if one.handle not in started:
                started.add(one.handle)
                found.append(one)
                if one.handle == waiting[0]:
                    for other in waiting[1:ahead]:
                        started.add(other)
                        found.append(gathers[other])
            continue
        found.append(one)
        following = follows.get(one.handle, "") if isinstance(one, Wait) else ""
        if following and following not in started:
            started.add(following)
            found.append(gathers[following])
    return found
