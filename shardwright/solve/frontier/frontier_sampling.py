"""Selects frontier points to show, without near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def spaced(
    items: Sequence[T],
    costs: Sequence[tuple[float, int]],
    most: int,
    resolution: float,
    keep_near: Sequence[tuple[float, int]] = (),
) -> list[T]:
    """The non-dominated items in (time, memory), fastest first, at most about `most` of them.

    Both ends stay, and for each cost in `keep_near` the fastest item that needs no more memory.
    Of the others those stay that differ from their faster neighbour by more than the fraction
    `resolution` of time or memory; of too many, those in the narrowest gaps are dropped.

    >>> spaced("abcd", [(1.0, 9), (2.0, 8), (2.0, 9), (2.0005, 7)], 9, 0.1)
    ['a', 'b', 'd']
    """
    order = sorted(range(len(items)), key=lambda i: (costs[i], i))
    front: list[int] = []
    for i in order:
        if not front or costs[i][1] < costs[front[-1]][1]:
            front.append(i)
    needed = {front[0], front[-1]}
    for _, memory in keep_near:
        needed.add(next(i for i in front if costs[i][1] <= memory))
    kept = [
        i
        for before, i in zip([front[0], *front], front, strict=False)
        if i in needed or _differ(costs[before], costs[i], resolution)
    ]
    while len(kept) > max(most, len(needed)):
        gaps = {
            b: (costs[c][0] / costs[a][0] - 1) + (costs[a][1] / costs[c][1] - 1)
            for a, b, c in zip(kept, kept[1:], kept[2:], strict=False)
            if b not in needed
        }
        kept.remove(min(gaps, key=lambda i: (gaps[i], i)))
    return [items[i] for i in kept]


def _differ(fast: tuple[float, int], small: tuple[float, int], resolution: float) -> bool:
    more_time = small[0] > fast[0] * (1 + resolution)
    return more_time or fast[1] > small[1] * (1 + resolution)
