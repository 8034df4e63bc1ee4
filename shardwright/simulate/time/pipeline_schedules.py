"""Derives from a pipeline schedule the activations that are kept, and its passes in waves."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.schedules.registry import orders
from shardwright.ir.schedules.schedule import Kind


@lru_cache(maxsize=64)
def waiting(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[NDArray[np.int64], ...]:
    """Micro-batches of which each group keeps activations, whenever it may keep the most.

    For each group an array (moments, stages): the number of micro-batches that are kept for each
    stage, 0 for stages of other groups. A moment is the end of consecutive forward passes. If a
    backward pass has two parts, activations are kept until the second.
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


@lru_cache(maxsize=64)
def waves(
    schedule: str, groups: int, stages: int, micro_batches: int
) -> tuple[tuple[NDArray[np.int64], ...], ...]:
    """All passes in waves; a pass depends on passes of earlier waves only.

    A wave is four arrays with one element for each pass: group, kind, stage and micro-batch. Raises
    `ValueError` if passes of the schedule wait for each other.
    """
    every = orders(schedule, groups, stages, micro_batches)
    wave: dict[tuple[int, int, bool], int] = {}  # stage, micro-batch, whether forward
    last, positions = [0] * groups, [0] * groups
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    while any(position < len(mine) for position, mine in zip(positions, every, strict=True)):
        before = sum(positions)
        for g, mine in enumerate(every):
            while positions[g] < len(mine):
                stage, number, kind = mine[positions[g]]
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
                positions[g] += 1
        if sum(positions) == before:
            raise ValueError(f"the schedule {schedule} waits for itself")
    return tuple(tuple(np.array(found[when], np.int64).T) for when in sorted(found))
