"""Pipeline schedules: the order of passes on each group of devices.

Papers: GPipe (arXiv 1811.06965); 1F1B, which is PipeDream-Flush (arXiv 2006.09503); interleaved
1F1B (Megatron-LM, arXiv 2104.04473, section 2.2); ZB1P and ZB-V (arXiv 2401.10241, sections 3 and
6), in which a backward pass is two: of what came in, for which the stage before waits, and of the
weights, for which nobody does.
Oracle: the orders that `torch.distributed.pipelining` makes, and runs.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.pipeline import ASYNC, MULTIPLE, SCHEDULES, PipelineError


class Kind(enum.IntEnum):
    """What a pass computes: values, all gradients, those of what came in, those of weights."""

    FORWARD = 0
    BACKWARD = 1
    INPUTS = 2
    WEIGHTS = 3


class Pass(NamedTuple):
    """One pass of `stage`, of micro-batch `number`."""

    stage: int
    number: int
    kind: Kind


@lru_cache(maxsize=64)
def orders(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[tuple[Pass, ...], ...]:
    """The passes of each of `groups` groups of devices, which take turns at the `stages`."""
    if schedule not in SCHEDULES:
        raise PipelineError(f"the schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    if schedule not in MULTIPLE:
        return tuple(tuple(_single(schedule, s, stages, micro_batches)) for s in range(stages))
    if schedule == "ZBVZeroBubble":
        return tuple(tuple(_in_a_v(g, groups, micro_batches)) for g in range(groups))
    split = schedule == "InterleavedZeroBubble"
    each = stages // groups
    return tuple(
        tuple(_interleaved(g, groups, each, micro_batches, split=split)) for g in range(groups)
    )


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """Of how many micro-batches a stage that has its group to itself keeps activations at most.

    >>> [in_flight("1F1B", stage, 4, 8) for stage in range(4)]
    [4, 3, 2, 1]
    """
    if schedule.startswith(ASYNC):
        return stages - stage  # mini-batches, as they follow each other without a break
    return micro_batches if schedule == "GPipe" else min(micro_batches, stages - stage)


@lru_cache(maxsize=64)
def waiting(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[NDArray[np.int64], ...]:
    """Micro-batches of which each group keeps activations, at the moments at which it keeps most.

    Of each group, (moments, stages): for every stage how many wait there, none elsewhere.
    Activations of a backward pass in two halves are kept until the second.
    """
    found = []
    for mine in orders(schedule, groups, stages, micro_batches):
        now, moments = [0] * stages, []
        for one, behind in zip(mine, [*mine[1:], None], strict=True):
            if one.kind is Kind.FORWARD:
                now[one.stage] += 1
                if behind is None or behind.kind is not Kind.FORWARD:
                    moments.append(tuple(now))
            elif one.kind is not Kind.INPUTS:
                now[one.stage] -= 1
        found.append(np.array(sorted(set(moments)), np.int64))
    return tuple(found)


def _single(schedule: str, stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Some forward passes, then one backward and one forward pass in turns."""
    ahead = in_flight(schedule, stage, stages, micro_batches)
    for number in range(min(ahead, micro_batches)):
        yield Pass(stage, number, Kind.FORWARD)
    for number in range(micro_batches):
        yield Pass(stage, number, Kind.BACKWARD)
        if number + ahead < micro_batches:
            yield Pass(stage, number + ahead, Kind.FORWARD)


def _interleaved(
    group: int, groups: int, each: int, micro_batches: int, *, split: bool
) -> Iterator[Pass]:
    """Micro-batches in rounds of about as many as groups, all stages of the group in each round.

    Backward passes begin two forward passes later for every group that is behind, or one later
    where they are `split`: there, those of weights follow as many passes later as groups are
    ahead, which is when others would wait.
    """
    round_size = micro_batches // max(1, micro_batches // groups)
    total = each * micro_batches

    def at(place: int, *, back: bool) -> tuple[int, int]:
        """Stage and micro-batch of the forward or backward pass at a place."""
        rounds, turn = divmod(place, round_size * each)
        local, number = divmod(turn, round_size)
        local = each - 1 - local if back else local
        return local * groups + group, rounds * round_size + number

    hops = groups - 1 - group
    ahead = min((each - 1) * round_size + (1 if split else 2) * hops, total)
    later = group if split else total
    for place in range(ahead):
        yield Pass(*at(place, back=False), Kind.FORWARD)
    for place in range(total):
        if place + ahead < total:
            yield Pass(*at(place + ahead, back=False), Kind.FORWARD)
        yield Pass(*at(place, back=True), Kind.INPUTS if split else Kind.BACKWARD)
        if place >= later:
            yield Pass(*at(place - later, back=True), Kind.WEIGHTS)
    for place in range(max(0, total - later), total) if split else ():
        yield Pass(*at(place, back=True), Kind.WEIGHTS)


def _in_a_v(group: int, groups: int, micro_batches: int) -> Iterator[Pass]:
    """ZB-V: down through all groups and up again, so that each has a first and a last stage.

    The order is made for at least twice as many micro-batches as groups, less one; those that are
    not there are left out.
    """
    down, up = group, 2 * groups - 1 - group
    count = max(2 * groups - 1, micro_batches)
    forward, both = (Kind.FORWARD,), (Kind.INPUTS, Kind.WEIGHTS)
    made: Counter[tuple[int, Kind]] = Counter()

    def steps() -> Iterator[tuple[int, Sequence[Kind]]]:
        yield from [(down, forward)] * (2 * (groups - group) - 1)
        yield from [(up, forward), (down, forward)] * group
        yield from [(up, forward + both)] * (groups - group)
        while made[up, Kind.FORWARD] < max(made[down, Kind.FORWARD], count):
            if made[down, Kind.FORWARD] < count:
                yield down, forward
            yield down, both
            yield up, forward + both
        yield from [(down, both[:1]), (up, both[:1])] * group
        yield from [(down, both)] * (groups - group)
        for stage in (up, down):
            yield from [(stage, both[1:])] * (count - made[stage, Kind.WEIGHTS])

    for stage, kinds in steps():
        for kind in kinds:
            number = made[stage, kind]
            made[stage, kind] += 1
            if number < micro_batches:
                yield Pass(stage, number, kind)


@lru_cache(maxsize=64)
def waves(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[tuple[NDArray[np.int64], ...], ...]:
    """All passes in waves, each of passes that depend on earlier waves only.

    Of every pass of a wave its group, kind, stage and micro-batch: four arrays.
    """
    every = orders(schedule, groups, stages, micro_batches)
    wave: dict[tuple[int, int, bool], int] = {}  # stage, micro-batch, whether forward
    last, places = [0] * groups, [0] * groups
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    while any(place < len(mine) for place, mine in zip(places, every, strict=True)):
        before = sum(places)
        for g, mine in enumerate(every):
            while places[g] < len(mine):
                stage, number, kind = mine[places[g]]
                needs = 0
                if kind is not Kind.WEIGHTS:
                    forward = kind is Kind.FORWARD
                    other = stage - 1 if forward else stage + 1
                    if 0 <= other < stages:
                        if (other, number, forward) not in wave:
                            break
                        needs = wave[other, number, forward]
                last[g] = max(last[g], needs) + 1
                if kind is not Kind.WEIGHTS:
                    wave[stage, number, kind is Kind.FORWARD] = last[g]
                found.setdefault(last[g], []).append((g, kind, stage, number))
                places[g] += 1
        if sum(places) == before:
            raise ValueError(f"the schedule {schedule} waits for itself")
    return tuple(tuple(np.array(found[when], np.int64).T) for when in sorted(found))
