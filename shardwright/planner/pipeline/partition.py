"""Cuts a chain into stages so that a pipeline through them is fastest.

A step of M micro-batches takes (M - 1)/M · max + 1/M · sum of the seconds of its stages: M
micro-batches in the slowest stage and one in each of the others. With a bound on the slowest stage,
the least sum is a shortest path, O(P · I) for P stages and I intervals. Bounds are tried from the
smallest feasible one upwards, until the bound and the least sum cannot improve on the best.

Paper: the stage partition of Alpa (arXiv 2201.12023), section 5.2.
Deviation: each stage has its own costs, because early stages keep more activations. Where there are
many bounds, only some are tried.
Oracle: enumeration over all cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from shardwright.solve.elimination.problem import Bools, Floats, Ints

_EVERY_BOUND = 200
_SOME = 2000  # costs of which more than those are different, if there are many at all
_BOUNDS = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, np.inf)


@final
@dataclass(frozen=True, eq=False)
class Intervals:
    """The intervals of a chain that may be stages.

    Attributes:
        begin: the position at which each interval begins, (I,).
        end: the position at which it ends, (I,), in ascending order.
        positions: the number of positions in the chain, both ends included.
    """

    begin: Ints
    end: Ints
    positions: int

    @classmethod
    def of(cls, may: Bools) -> Intervals:
        """All intervals from a position a to a position b > a with `may[a, b]`."""
        end, begin = np.nonzero(np.tril(may.T, -1))
        return cls(begin, end, len(may))

    def part(self, kept: Bools) -> Intervals:
        """The intervals that are kept, (I,), in the same order."""
        return Intervals(self.begin[kept], self.end[kept], self.positions)

    @cached_property
    def starts(self) -> Ints:
        """For each position that is an end, the first interval that ends there: (E,)."""
        return np.flatnonzero(np.diff(self.end, prepend=-1))


def objective(costs: list[float], micro_batches: int) -> float:
    """Seconds of a step whose stages take `costs` seconds each.

    >>> objective([4.0, 2.0], 2)
    5.0
    """
    return ((micro_batches - 1) * max(costs) + sum(costs)) / micro_batches


def partition(costs: Floats, intervals: Intervals, micro_batches: int) -> list[int] | None:
    """The interval of each of P stages; None if no P intervals cover the chain.

    `costs[s, i]` are the seconds of stage s for interval i, (P, I), infinite if it is infeasible.
    Stages of equal costs may share a row, by `np.broadcast_to`.
    """
    rows = costs if costs.strides[0] else costs[:1]
    least = slowest_at_least(costs, intervals)
    if not np.isfinite(least):
        return None
    bounds = rows[np.isfinite(rows) & (rows >= least)]
    if len(np.unique(bounds[:_SOME])) <= _EVERY_BOUND:  # to sort all takes long
        bounds = np.unique(bounds)
    if len(bounds) > _EVERY_BOUND:
        bounds = np.array([least * factor for factor in _BOUNDS])
    free = _shortest(costs, intervals)
    assert free is not None
    sum_at_least = sum(_taken(costs, free))
    best: tuple[float, list[int]] | None = None
    before = 0.0  # a solution that is new within a bound is slower than the bound before
    for bound in bounds.tolist():
        at_least = ((micro_batches - 1) * before + sum_at_least) / micro_batches
        if best is not None and at_least >= best[0]:
            break
        before = bound
        found = _within(bound, costs, rows, intervals)
        if found is not None:
            value = objective(_taken(costs, found), micro_batches)
            if best is None or value < best[0]:
                best = value, found
    return best[1] if best else None


def _within(bound: float, costs: Floats, rows: Floats, intervals: Intervals) -> list[int] | None:
    """The intervals of the smallest sum of which none costs more than `bound`."""
    low = rows <= bound
    kept = np.logical_or.reduce(low)
    few = np.where(low[:, kept], rows[:, kept], np.inf)
    found = _shortest(np.broadcast_to(few, (len(costs), few.shape[1])), intervals.part(kept))
    return None if found is None else np.flatnonzero(kept)[found].tolist()


def _taken(costs: Floats, found: list[int]) -> list[float]:
    return [float(costs[s, i]) for s, i in enumerate(found)]


def slowest_at_least(costs: Floats, intervals: Intervals) -> float:
    """The least seconds of the slowest stage; infinite if no intervals cover the chain."""
    reach = _at_the_begin(intervals)
    for stage in costs:
        reach = _ends(np.maximum(reach[intervals.begin], stage), intervals)
    return float(reach[-1])


def _shortest(costs: Floats, intervals: Intervals) -> list[int] | None:
    """The intervals of the smallest sum."""
    reach, steps = _at_the_begin(intervals), []
    for stage in costs:
        sums = reach[intervals.begin] + stage
        reach = _ends(sums, intervals)
        steps.append((sums, reach))
    if not np.isfinite(reach[-1]):
        return None
    found: list[int] = []
    position = len(reach) - 1
    for sums, reach in reversed(steps):
        first, last = np.searchsorted(intervals.end, (position, position + 1)).tolist()
        found.append(first + int((sums[first:last] == reach[position]).argmax()))
        position = int(intervals.begin[found[-1]])
    return found[::-1]


def _at_the_begin(intervals: Intervals) -> Floats:
    reach = np.full(intervals.positions, np.inf)
    reach[0] = 0.0
    return reach


def _ends(sums: Floats, intervals: Intervals) -> Floats:
    """The least of the sums that end at each position: (I,) -> (positions,)."""
    found = np.full(intervals.positions, np.inf)
    if sums.size:
        found[intervals.end[intervals.starts]] = np.minimum.reduceat(sums, intervals.starts)
    return found
