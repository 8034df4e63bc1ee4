"""Copies parameters that are on the host to the device before they are read.

A copy is there for one region, forward or backward, or until it was gathered; the backward pass of
a region that runs again has that of the second run. Copies start in buckets, each when the one
before it has arrived, as FSDP2 does (`CPUOffloadPolicy`) with what it gathers. A copy for the
backward part is not started before the `Seed`, as the backward part may never be asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod

from shardwright.ir.buckets import gather_buckets
from shardwright.ir.graph import ITEM_BYTES
from shardwright.program.step.host_copies import Fetch
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Relayout,
    Seed,
    StepInstruction,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.purposes import parts_of_step
from shardwright.program.step.step_program import StepProgram


def fetch_read(program: StepProgram) -> StepProgram:
    """`program` with copies of the parameters that regions read as they are stored."""
    if not program.on_host:
        return program
    copies = _Copies(program)
    starts = _starts(program, copies)
    of_call: dict[str, dict[str, str]] = {}  # of calls that run again
    found: list[StepInstruction] = []
    for at, one in enumerate(program.instructions):
        found += copies.fetched(starts.get(at, ()))
        if isinstance(one, Forward):
            names = copies.of(one.inputs)
            if one.again:
                of_call[one.call] = names
            one = replace(one, inputs=tuple(names.get(name, name) for name in one.inputs))
        elif isinstance(one, Backward) and one.copies:
            names = copies.of(name for _, name in one.copies) | of_call.get(one.call, {})
            again = tuple((place, names.get(name, name)) for place, name in one.copies)
            one = replace(one, copies=again)
        found.append(one)
    return replace(program, instructions=tuple(found))


def fetch_gathered(program: StepProgram) -> StepProgram:
    """`program` with copies of what is gathered or otherwise moved, and all of them early."""
    if not program.on_host:
        return program
    copies = _Copies(program)
    found: list[StepInstruction] = []
    for one in program.instructions:
        if isinstance(one, Transfer):
            names = copies.new([part.value for part in one.parts], found)
            parts = [replace(p, value=names.get(p.value, p.value)) for p in one.parts]
            one = replace(one, parts=tuple(parts))
        elif isinstance(one, Relayout):
            names = copies.new([one.value], found)
            one = replace(one, value=names.get(one.value, one.value))
        found.append(one)
    at = next((i for i, one in enumerate(found) if isinstance(one, Seed)), 0)
    return replace(program, instructions=(*_early(found[:at], copies), *_early(found[at:], copies)))


class _Copies:
    """Makes names of copies, and the instructions that make these."""

    def __init__(self, program: StepProgram) -> None:
        shapes = {load.leaf: load.shape for load in program.loads}
        self.tiles = {leaf: (shapes[leaf], dtype) for leaf, dtype in program.on_host}
        known = [one for one in program.host_copies() if isinstance(one, Fetch)]
        self.times = Counter(one.value for one in known)  # so far, by leaf
        self.number = len(known)
        self.latest: dict[str, str] = {}  # leaf -> its copy

    def bytes(self, leaf: str) -> int:
        shape, dtype = self.tiles[leaf]
        return prod(shape) * ITEM_BYTES[dtype]

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """The latest copies of those names that are leaves on the host."""
        return {name: self.latest[name] for name in names if name in self.latest}

    def fetched(self, leaves: Sequence[str]) -> list[StepInstruction]:
        """Instructions that make new copies of leaves."""
        found: list[StepInstruction] = []
        waits: list[StepInstruction] = []
        for leaf in leaves:
            number = self.times[leaf]
            self.times[leaf] += 1
            result = self.latest[leaf] = f"device/{leaf}{f'.{number}' if number else ''}"
            self.number += 1
            found.append(Fetch(leaf, result, *self.tiles[leaf], f"f{self.number}"))
            waits.append(Wait(f"f{self.number}", (result,)))
        return found + waits

    def new(self, names: Sequence[str], found: list[StepInstruction]) -> dict[str, str]:
        """Add instructions for new copies of those names that are leaves on the host."""
        leaves = [name for name in dict.fromkeys(names) if name in self.tiles]
        found += self.fetched(leaves)
        return self.of(leaves)


def _starts(program: StepProgram, copies: _Copies) -> Mapping[int, list[str]]:
    """By the place of the first reader of each bucket, its leaves."""
    again: defaultdict[str, set[str]] = defaultdict(set)
    wanted: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    parts = parts_of_step(program.instructions)
    for at, (part, one) in enumerate(zip(parts, program.instructions, strict=True)):
        if isinstance(one, Forward):
            names = [name for name in dict.fromkeys(one.inputs) if name in copies.tiles]
            if one.again:
                again[one.call].update(names)
        elif isinstance(one, Backward):
            given = dict.fromkeys(name for _, name in one.copies if name in copies.tiles)
            names = [name for name in given if name not in again[one.call]]
        else:
            continue
        wanted[part] += [(at, name) for name in names]
    found: defaultdict[int, list[str]] = defaultdict(list)
    for uses in wanted.values():
        for group in gather_buckets([(copies.bytes(leaf), leaf) for _, leaf in uses]):
            first = uses[group[0]][0]
            found[first] += dict.fromkeys(uses[number][1] for number in group)
    return found


def _early(instructions: Sequence[StepInstruction], copies: _Copies) -> list[StepInstruction]:
    """`instructions` with each group of copies started when the one before it has arrived."""
    groups: list[list[Fetch]] = []
    last: dict[str, int] = {}  # handle of the last wait for a group -> its number
    for one in instructions:
        if isinstance(one, Fetch) and one.value in copies.tiles:
            if not groups or groups[-1][-1].handle in last:
                groups.append([])
            groups[-1].append(one)
        elif isinstance(one, Wait) and groups and one.handle == groups[-1][-1].handle:
            last[one.handle] = len(groups) - 1
    mine = {one.handle for group in groups for one in group}
    found: list[StepInstruction] = []
    for one in instructions:
        if isinstance(one, Fetch) and one.handle in mine:
            if one is groups[0][0]:
                found += groups[0]
            continue
        found.append(one)
        if isinstance(one, Wait) and (number := last.get(one.handle)) is not None:
            found += groups[number + 1] if number + 1 < len(groups) else ()
    return found
