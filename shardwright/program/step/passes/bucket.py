"""Buckets transfers of parameters, of their gradients and of results.

A collective of many tensors pays its latency once. Copies that are read one after the other are
gathered together before the first is read; gradients are reduced together when the last is
complete (Li et al., PyTorch Distributed, VLDB 2020; FSDP, arXiv 2304.11277, whose buckets are
modules; these have a size, and end with layers). Results are summed together when the last one is
known.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.ir.buckets import gather_buckets, gradient_buckets
from shardwright.ir.graph import VerifyError
from shardwright.ir.pipeline import AXIS
from shardwright.ir.redistribution import Collective
from shardwright.program.step.async_pipeline.versions import Version
from shardwright.program.step.channels import axis_of
from shardwright.program.step.host_copies import StoreGradient
from shardwright.program.step.instructions import (
    Accumulate,
    Add,
    Relayout,
    StepInstruction,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.lower.purposes import Purpose, parts_of_step, purposes
from shardwright.program.step.step_program import StepProgram

Kind = tuple[Collective, str, str, bool]
_BUCKETED = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def bucket(program: StepProgram) -> StepProgram:
    """`program` with transfers in buckets."""
    known, parameters = purposes(program), _parameters(program)
    instructions = list(program.instructions)
    present = Counter(known.values())
    for purpose in (Purpose.COPY, Purpose.GRADIENT, Purpose.RESULT):
        if present[purpose] < 2:
            continue
        # A tensor that moves along two axes is in a bucket for each, and sums of what was scattered
        # may be summed once more.
        for level in range(len(program.mesh.axes) + 1):
            levels = _levels(instructions, known, purpose)
            if level not in levels.values():
                break
            at_level = {handle for handle, found in levels.items() if found == level}
            found = _groups(program, instructions, at_level, parameters, purpose, level)
            if groups := [group for group in found if len(group) > 1]:
                merge = _gathered if purpose is Purpose.COPY else _reduced
                instructions = merge(instructions, groups)
    return replace(program, instructions=tuple(instructions))


def _levels(
    instructions: Sequence[StepInstruction], known: Mapping[str, Purpose], purpose: Purpose
) -> dict[str, int]:
    """By handle, how many others of the purpose each transfer of it has before."""
    depth: dict[str, int] = {}
    levels: dict[str, int] = {}
    for one in instructions:
        if isinstance(one, Wait):
            if one.handle in levels:
                depth.update(dict.fromkeys(one.results, levels[one.handle] + 1))
        elif isinstance(one, Relayout | Add | Accumulate):
            deepest = max((depth.get(name, 0) for name in (*reads(one), *writes(one))), default=0)
            depth.update(dict.fromkeys(writes(one), deepest))
        elif not isinstance(one, Transfer) or known[one.handle] is not purpose:
            continue
        elif axis_of(one.channel) != AXIS:  # each stage would make other buckets
            levels[one.handle] = max(depth.get(name, 0) for name in reads(one))
    return levels


def _groups(
    program: StepProgram,
    instructions: Sequence[StepInstruction],
    handles: Collection[str],
    parameters: Mapping[str, str],
    purpose: Purpose,
    level: int,
) -> Iterator[list[str]]:
    """The handles of each bucket of the transfers `handles`, which are of a purpose and level.

    Copies of frozen parameters, as adapters have them, are in buckets of their own.
    """
    runs: defaultdict[tuple[int, Kind], list[Transfer]] = defaultdict(list)
    frozen = set(program.leaves) - {leaf for leaf, _ in program.gradients}
    for part_of_step, one in zip(parts_of_step(instructions), instructions, strict=True):
        if not isinstance(one, Transfer) or one.handle not in handles:
            continue
        if one.collective in _BUCKETED and not _is_alone(one, program):
            is_frozen = parameters.get(one.handle) in frozen
            kind = one.collective, one.channel, one.parts[0].dtype, is_frozen
            run = 0 if purpose is Purpose.RESULT else part_of_step
            runs[run, kind].append(one)
    for found in runs.values():
        if purpose is Purpose.RESULT:
            yield [one.handle for one in found]
        else:
            yield from _filled(found, parameters, purpose, level, program.sum_bytes)


def _parameters(program: StepProgram) -> dict[str, str]:
    """The parameter whose copy or gradient a transfer moves, by its handle."""
    leaf_of = {leaf: leaf for leaf in program.leaves}
    found: dict[str, str] = {}
    for one in program.instructions:  # copies follow from parameters
        if isinstance(one, Version):
            leaf_of.update((result, leaf) for leaf, result in one.parameters)
        elif isinstance(one, Relayout) and one.value in leaf_of:
            leaf_of[one.result] = leaf_of[one.value]
        elif isinstance(one, Transfer):
            for part in one.parts:
                if part.value in leaf_of:
                    leaf_of[part.result] = found[one.handle] = leaf_of[part.value]
    of_gradient = {value: leaf for leaf, value in program.gradients}
    for one in reversed(program.instructions):  # and gradients lead to theirs
        if isinstance(one, Accumulate):
            if one.total in of_gradient:
                of_gradient[one.value] = of_gradient[one.total]
        elif isinstance(one, Relayout | Add | StoreGradient):
            if one.result in of_gradient:
                of_gradient.update(dict.fromkeys(reads(one), of_gradient[one.result]))
        elif isinstance(one, Transfer):
            for part in one.parts:
                if part.result in of_gradient:
                    of_gradient[part.value] = found[one.handle] = of_gradient[part.result]
    return found


def _is_alone(one: Transfer, program: StepProgram) -> bool:
    """Whether a tensor is so large that sending it alone is cheaper than copying it to a bucket."""
    least, ranks = program.alone_bytes, dict(program.mesh.axes)[one.channel]
    return least is not None and one.bytes >= least and one.parts[0].in_order(ranks)


def _filled(
    run: Sequence[Transfer],
    parameters: Mapping[str, str],
    purpose: Purpose,
    level: int,
    sum_bytes: int,
) -> Iterator[list[str]]:
    """Buckets of transfers of one kind, given in the order of the program.

    `parameters` has the parameter of each, by handle.
    """
    # Gradients come in the opposite order of that in which parameters are read.
    ordered = run if purpose is Purpose.COPY else run[::-1]
    tensors = [(one.bytes, parameters.get(one.handle, "")) for one in ordered]
    if run[0].collective is Collective.ALL_REDUCE and purpose is Purpose.GRADIENT and not level:
        numbers: Sequence[Sequence[int]] = gradient_buckets(tensors, sum_bytes)
    else:
        # What is summed along one axis already is the small part of the gradients.
        least = sum_bytes if purpose is Purpose.GRADIENT and level else 0
        numbers = gather_buckets(tensors, least)
    for group in numbers:
        yield [ordered[i].handle for i in group]


def _gathered(
    instructions: list[StepInstruction], groups: Sequence[Sequence[str]]
) -> list[StepInstruction]:
    """Each group in one transfer, at the position of its first.

    Transfers whose operands do not exist at that position stay alone.
    """
    group = {handle: number for number, handles in enumerate(groups) for handle in handles}
    since: dict[str, int] = {}  # value -> the index of the instruction that makes it first
    for at, one in enumerate(instructions):
        for name in writes(one):
            since.setdefault(name, at)
    first: dict[int, int] = {}  # group -> the index of its first transfer
    members: defaultdict[int, list[Transfer]] = defaultdict(list)
    for at, one in enumerate(instructions):
        if isinstance(one, Transfer) and one.handle in group:
            position = first.setdefault(group[one.handle], at)
            if all(since.get(name, -1) < position for name in reads(one)):
                members[group[one.handle]].append(one)
    merged = {ones[0].handle: ones for ones in members.values()}
    gone = {one.handle for ones in members.values() for one in ones}
    found: list[StepInstruction] = []
    for one in instructions:
        if isinstance(one, Transfer) and one.handle in merged:
            found += _merged(merged[one.handle])
        elif not (isinstance(one, Transfer | Wait) and one.handle in gone):
            found.append(one)
    return found


@dataclass
class _Open:
    """A group whose last transfer has not come yet, and what depends on those before."""

    last: int
    members: list[Transfer] = field(default_factory=list)
    behind: list[StepInstruction] = field(default_factory=list)


def _reduced(
    instructions: list[StepInstruction], groups: Sequence[Sequence[str]]
) -> list[StepInstruction]:
    """Each group in one transfer, at the position of its last; what depends on it follows."""
    group = {handle: number for number, handles in enumerate(groups) for handle in handles}
    last: dict[int, int] = {}
    for at, one in enumerate(instructions):
        if isinstance(one, Transfer) and one.handle in group:
            last[group[one.handle]] = at
    open_groups = {number: _Open(at) for number, at in last.items()}
    needs: dict[str, int] = {}  # value, or handle, that depends on a group
    found: list[StepInstruction] = []
    for at, one in enumerate(instructions):
        if isinstance(one, Transfer) and one.handle in group:
            number = group[one.handle]
            mine = open_groups[number]
            if any(needs.get(name) in open_groups for name in reads(one)):
                raise VerifyError(f"{one}: depends on a bucket that is not complete")
            mine.members.append(one)
            needs.update((part.result, number) for part in one.parts)
            if at == mine.last:
                found += [*_merged(mine.members), *mine.behind]
                del open_groups[number]
            continue
        if isinstance(one, Wait) and one.handle in group:
            continue
        names = (one.handle,) if isinstance(one, Wait) else reads(one)
        waited = {needs[name] for name in names if needs.get(name) in open_groups}
        if not waited:
            found.append(one)
            continue
        number = max(waited, key=lambda each: open_groups[each].last)
        open_groups[number].behind.append(one)
        needs.update(dict.fromkeys(writes(one), number))
        if isinstance(one, Transfer | StoreGradient):
            needs[one.handle] = number
    return found


def _merged(members: Sequence[Transfer]) -> tuple[Transfer, Wait]:
    first = members[0]
    parts = tuple(part for one in members for part in one.parts)
    merged = replace(first, parts=parts)
    return merged, Wait(first.handle, tuple(part.result for part in parts))
