"""Lets copies to and from the host overlap with operators.

A value is copied to the host while the regions that read it run: its memory is needed until then,
so the copy is waited for after the last of them. It is copied back while the segment that runs
again before its own does: each copy from the host starts where the one before it has arrived, the
first at the start of the backward part (as torchtune prefetches, and Megatron-LM's fine-grained
offload). So at most two offloaded values of a micro-batch are in the memory of the device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from shardwright.program.step.host_copies import Fetch, Offload
from shardwright.program.step.instructions import Backward, Forward, StepInstruction, Wait, reads
from shardwright.program.step.step_program import StepProgram


def overlap_copies(program: StepProgram) -> StepProgram:
    """`program` with late waits for copies to the host, and early copies from it."""
    if not any(program.host_copies()):
        return program
    return _with_early_fetches(_with_late_waits(program))


def _with_late_waits(program: StepProgram) -> StepProgram:
    """`program` with each wait for a copy to the host after the last reader of the value."""
    value_of = {one.handle: one.value for one in program.host_copies() if isinstance(one, Offload)}
    last: dict[str, int] = {}
    waits: dict[str, Wait] = {}
    for at, one in enumerate(program.instructions):
        last.update(dict.fromkeys(reads(one), at))
        if isinstance(one, Wait) and one.handle in value_of:
            waits[one.handle] = one
    behind: defaultdict[int, list[Wait]] = defaultdict(list)
    for handle, wait in waits.items():
        behind[last[value_of[handle]]].append(wait)
    found: list[StepInstruction] = []
    for at, one in enumerate(program.instructions):
        if not (isinstance(one, Wait) and one.handle in waits):
            found.append(one)
        found += behind[at]
    return replace(program, instructions=tuple(found))


def _with_early_fetches(program: StepProgram) -> StepProgram:
    """`program` with the copies that a segment needs started when those before have arrived."""
    groups = _groups(program)
    leaves = set(program.leaves)
    fetched = {one.handle for group in groups for one in group}
    there: set[str] = set()  # values on the host, and those that were copied back
    in_flight: set[str] = set()
    found: list[StepInstruction] = []

    def start() -> None:
        if groups and not in_flight and there.issuperset(one.value for one in groups[0]):
            in_flight.update(one.handle for one in groups[0])
            found.extend(groups.pop(0))

    for one in program.instructions:
        if isinstance(one, Fetch) and one.value not in leaves:
            if groups and one is groups[0][0]:
                start()
            continue
        if isinstance(one, Backward) or (isinstance(one, Forward) and one.again):
            start()
        found.append(one)
        if isinstance(one, Wait):
            there.update(one.results)
            in_flight.discard(one.handle)
            if one.handle in fetched:
                start()
    return replace(program, instructions=tuple(found))


def _groups(program: StepProgram) -> list[list[Fetch]]:
    """The copies of offloaded values from the host, those that follow each other together."""
    leaves = set(program.leaves)
    found: list[list[Fetch]] = []
    handles: set[str] = set()
    together = False
    for one in program.instructions:
        mine = isinstance(one, Fetch) and one.value not in leaves
        if isinstance(one, Fetch) and mine:
            if not together:
                found.append([])
            found[-1].append(one)
            handles.add(one.handle)
        together = mine or (isinstance(one, Wait) and one.handle in handles)
    return found
