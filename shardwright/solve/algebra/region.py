"""The region in which better trade-offs may still lie: below the known staircase.

Paper: none of the four; the search zones of bi-objective optimisation (Klamroth, Lacour and
Vanderpooten 2015).
Deviation: of more than 64 corners neighbours are merged, so that a set of corners is one machine
word.
Complexity: O(log corners) for each sum and objective.
Oracle: the same corner by corner, in `tests/unit/solve/algebra/test_region.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.solve.algebra.minplus import Objectives, Rows
from shardwright.solve.elimination.problem import Floats, Ints, Point

Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]

_WORD = 64  # corners in a machine word
_ROUNDING = 1e-9  # sums of many seconds are off by less, relatively


@dataclass(frozen=True, eq=False)
class DominatedRegion:
    """All (time, memory) that lie at or below at least one of the corners in both.

    A point with a lower bound in each of `objectives` lies outside if at every corner one of its
    bounds exceeds the corner's value.
    """

    objectives: Objectives
    time: Floats  # (corners,)
    memory: Ints  # (corners,)

    @cached_property
    def _tables(self) -> list[tuple[Floats, Words]]:
        """For each objective the sorted values of corners, and the corners from each rank on."""
        time, memory = _merge_corners(self.time, self.memory)
        bits = np.uint64(1) << np.arange(len(time), dtype=np.uint64)
        found = []
        for a, b in zip(
            self.objectives.time.tolist(), self.objectives.memory.tolist(), strict=True
        ):
            values = (a * time + b * memory) * (1 + _ROUNDING)
            order = np.argsort(values, kind="stable")
            above = np.bitwise_or.accumulate(bits[order][::-1])[::-1]
            found.append((values[order], np.append(above, np.uint64(0))))
        return found

    def may_contain(self, values: Rows) -> Bools:
        """Whether a point that costs at least `values` may lie inside: (L, N) -> (N,)."""
        corners = np.full(values.shape[1], ~np.uint64(0))
        for row, (limits, above) in zip(values, self._tables, strict=True):
            corners &= above[np.searchsorted(limits, row)]
        return np.not_equal(corners, 0)

    def may_contain_sums(self, time: Floats, memory: Ints, rest: Rows, cell: Ints) -> Bools:
        """`may_contain` of partial sums; at least their cell of `rest` (L, C) is added: (N,)."""
        corners = np.full(len(time), ~np.uint64(0))
        for a, b, row, (limits, above) in zip(
            self.objectives.time.tolist(), self.objectives.memory.tolist(), rest, self._tables,
            strict=True,
        ):  # fmt: skip
            corners &= above[np.searchsorted(limits, a * time + b * memory + row[cell])]
        return np.not_equal(corners, 0)


def _merge_corners(time: Floats, memory: Ints) -> tuple[Floats, Ints]:
    """At most `_WORD` corners at or above the given ones."""
    groups = np.array_split(np.arange(len(time)), min(_WORD, len(time)))
    return (
        np.array([time[group].max() for group in groups]),
        np.array([memory[group].max() for group in groups], np.int64),
    )


def corners_below(points: Sequence[Point], tolerance: float) -> tuple[Floats, Ints]:
    """The corners of the region that improves a frontier by more than `tolerance` between its ends.

    A point below corner j needs less memory than `points[j]` and is faster than `points[j + 1]` by
    more than the fraction `tolerance` of its time.
    """
    time = [after.time * (1 - tolerance) for _, after in pairwise(points)]
    memory = [before.memory - 1 for before, _ in pairwise(points)]
    return np.array(time, np.float64), np.array(memory, np.int64)
