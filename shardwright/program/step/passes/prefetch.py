"""Starts gathers of parameters ahead of their first reader.

The next bucket, or the next few, are gathered while operators read the one before, in the forward
pass, in the backward pass and across micro-batches (FSDP, arXiv 2304.11277, section 4.3). A gather
for the backward part is not started before the `Seed`, as the backward part may never be asked for.

A bucket that is gathered along one axis and then along another takes its first step another bucket
earlier. Before that step tiles are small, so several buckets may share it: then it starts while the
buckets of the step before are read. In a pipeline copies that are gathered once a step are there
together sooner or later, so each stage starts all of them at once, and has them before its first
micro-batch arrives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import ne

from shardwright.program.step.instructions import (
    Seed,
    StepInstruction,
    Transfer,
    Wait,
    reads,
    writes,
)
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


@dataclass(frozen=True)
class _Bucket:
    """The instructions that start a gather, and those that start its second step, if it has one."""

    first: tuple[StepInstruction, ...]
    second: tuple[StepInstruction, ...] = ()


def _prefetched(
    instructions: Sequence[StepInstruction], program: StepProgram, known: Mapping[str, Purpose]
) -> list[StepInstruction]:
    """One part of the program."""
    buckets = _buckets(instructions, program, known)
    waiting = {handle: number for number, (handle, _) in enumerate(buckets)}
    moved = {id(one) for _, bucket in buckets for one in (*bucket.first, *bucket.second)}
    at_once = _are_kept(program, known)
    ahead = len(buckets) if at_once else program.ahead
    groups = [tuple(map(id, bucket.first)) for _, bucket in buckets]
    of_first = list(accumulate(map(ne, groups[1:], groups), initial=0))  # groups share first steps
    found: list[StepInstruction] = []
    started: set[int] = set()

    def start(some: Iterable[StepInstruction]) -> None:
        for one in some:
            if id(one) not in started:
                started.add(id(one))
                found.append(one)

    def start_from(number: int) -> None:
        """Start what is in flight before the bucket with this number is waited for."""
        for index in range(number, len(buckets)):
            if of_first[index] - of_first[number] > ahead:
                break
            _, bucket = buckets[index]
            if index < number + ahead or bucket.second:
                start(bucket.first)
        for _, bucket in buckets[number : number + ahead]:
            start(bucket.second)

    if at_once:
        start_from(0)
    following = 0
    for one in instructions:
        if id(one) in moved:
            if id(one) not in started:
                start_from(following)
            continue
        found.append(one)
        if isinstance(one, Wait) and one.handle in waiting:
            following = waiting[one.handle] + 1
            start_from(following)
    return found


def _buckets(
    instructions: Sequence[StepInstruction], program: StepProgram, known: Mapping[str, Purpose]
) -> list[tuple[str, _Bucket]]:
    """The handle of each gather's last step and the gather, in the order of their waits."""
    leaves = set(program.leaves)
    copies = [
        one
        for one in instructions
        if isinstance(one, Transfer) and known[one.handle] is Purpose.COPY
    ]
    firsts = {one.handle: one for one in copies if leaves.issuperset(reads(one))}
    waits = {one.handle: one for one in instructions if isinstance(one, Wait)}
    arrived = {
        name: handle for handle in firsts if handle in waits for name in writes(waits[handle])
    }
    readers: defaultdict[str, set[int]] = defaultdict(set)
    for one in instructions:
        for name in arrived.keys() & reads(one):
            readers[arrived[name]].add(id(one))
    found = {handle: _Bucket((one,)) for handle, one in firsts.items()}
    seconds = [one for one in copies if one.handle not in firsts and arrived.keys() & reads(one)]
    again = {id(one) for one in seconds}
    for one in seconds:
        given = dict.fromkeys(arrived.get(name, "") for name in reads(one))
        if "" not in given and all(again.issuperset(readers[handle]) for handle in given):
            waited = [waits[handle] for handle in given]
            found[one.handle] = _Bucket(tuple(firsts[h] for h in given), (*waited, one))
            for handle in given:
                found.pop(handle, None)  # others may read it, too
    return [(handle, found[handle]) for handle in waits if handle in found]


def _are_kept(program: StepProgram, known: Mapping[str, Purpose]) -> bool:
    """Whether a stage gathers each parameter once, and keeps it for all micro-batches."""
    gathered = Counter(
        name
        for one in program.transfers()
        if known[one.handle] is Purpose.COPY
        for name in reads(one)
    )
    return any(True for _ in program.messages()) and set(gathered.values()) == {1}
