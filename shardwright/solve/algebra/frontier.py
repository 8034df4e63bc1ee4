"""Frontiers of (time, memory) and their algebra: reduce, union, product.

Paper: TensorOpt / FT (arXiv 2004.10856), the frontier operations.
Deviation: thousands of frontiers are stored end to end in flat arrays, and every operation works
on all of them at once. The trace of a point holds the indices of the points that it was made from;
it is followed only at the end of a search.
Complexity: O(n log n) to reduce n candidates; a product of frontiers of F and G points has F · G.
Oracle: `tests/harness/oracles.py::non_dominated`.
Known inefficiency: a product sorts all pairs, although rows of the outer sum are already sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.solve.elimination.problem import Floats, Ints

Keep = Callable[[Ints, Floats, Ints], NDArray[np.bool_]]  # of frontier, time, memory: worth keeping

_CANDIDATES_AT_ONCE = 1 << 21  # bounds the memory of a product, about 100 MB


@dataclass(frozen=True, slots=True, eq=False)
class Frontiers:
    """Frontiers end to end: points `starts[i]` to `starts[i + 1]` are frontier i.

    In each frontier time strictly rises and memory strictly falls. `trace` has one row for each
    parent table: the index, among all points of that table, of the point that this one was made of.
    """

    starts: Ints  # (frontiers + 1,)
    time: Floats  # (points,)
    memory: Ints  # (points,)
    trace: tuple[Ints, ...] = ()  # parents x (points,)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Ints:
        """Number of points of each frontier."""
        return np.diff(self.starts)

    def traced(self, *rows: Ints) -> Frontiers:
        """The same points with rows added to their trace."""
        return Frontiers(self.starts, self.time, self.memory, self.trace + rows)


def singletons(time: Floats, memory: Ints, limit: int | None = None) -> Frontiers:
    """A frontier of one point for each entry; an empty one where the time is infinite."""
    starts = np.arange(time.size + 1)
    return reduce(starts, time.ravel(), memory.ravel(), (), limit)


def reduce(
    starts: Ints,
    time: Floats,
    memory: Ints,
    trace: Sequence[Ints] = (),
    limit: int | None = None,
) -> Frontiers:
    """Drop every candidate that another of its own frontier beats or equals.

    Sorted by time, then memory, a candidate survives exactly when it needs less memory than all
    before it. Of equal candidates the first given survives. Infinite times and memories above
    `limit` are dropped too.

    >>> front = reduce(np.array([0, 4]), np.array([2.0, 1, 3, 3]), np.array([5, 7, 5, 4]))
    >>> front.time.tolist(), front.memory.tolist()
    ([1.0, 2.0, 3.0], [7, 5, 4])
    """
    num = len(starts) - 1
    cell = np.repeat(np.arange(num), np.diff(starts))
    allowed = np.isfinite(time) if limit is None else np.isfinite(time) & (memory <= limit)
    kept = np.flatnonzero(allowed)
    if kept.size:
        kept = kept[np.lexsort((memory[kept], time[kept], cell[kept]))]
        needed = memory[kept] - memory[kept].min()
        span = int(needed.max()) + 1
        if span * num >= 2**62:  # ranks are small
            needed = np.unique(needed, return_inverse=True)[1].astype(np.int64)
            span = len(kept)
        # Every frontier starts below the one before it, so one running minimum serves them all.
        needed = needed - cell[kept] * span
        lowest = np.minimum.accumulate(needed)
        kept = kept[np.concatenate(([True], needed[1:] < lowest[:-1]))]
    counts = np.bincount(cell[kept], minlength=num)
    return Frontiers(
        np.concatenate(([0], np.cumsum(counts))),
        time[kept],
        memory[kept],
        tuple(row[kept] for row in trace),
    )


def union(table: Frontiers, width: int) -> Frontiers:
    """Merge every `width` consecutive frontiers into one; traces do not change."""
    return reduce(table.starts[::width], table.time, table.memory, table.trace)


def take(table: Frontiers, cells: Ints) -> Frontiers:
    """Frontier `cells[i]` of `table` becomes frontier i; the trace is the index in `table`."""
    lengths = table.lengths[cells]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    index = np.arange(starts[-1]) + np.repeat(table.starts[cells] - starts[:-1], lengths)
    return Frontiers(starts, table.time[index], table.memory[index], (index,))


def select(table: Frontiers, kept: NDArray[np.bool_]) -> Frontiers:
    """The points of `table` selected by the mask `kept`: (points,)."""
    before = np.concatenate(([0], np.cumsum(kept)))
    return Frontiers(
        before[table.starts],
        table.time[kept],
        table.memory[kept],
        tuple(row[kept] for row in table.trace),
    )


def thin_by_time(table: Frontiers, slack: float) -> Frontiers:
    """Keep the smallest of all points of a frontier whose times fall into one interval of `slack`.

    For every dropped point a kept one needs no more memory and less than `slack` more time.
    """
    span = np.floor(table.time / slack)
    cell = np.repeat(np.arange(len(table)), table.lengths)
    last = np.ones(len(span), bool)
    last[:-1] = (span[1:] != span[:-1]) | (cell[1:] != cell[:-1])
    return select(table, last)


def product(
    left: Frontiers,
    right: Frontiers,
    cells: Ints,
    limit: int | None = None,
    keep: Keep | None = None,
) -> Frontiers:
    """Frontier i is all sums of a point of `left[i]` and a point of `right[cells[i]]`, reduced.

    The trace is that of the left point, with the index of the right point as one more row. Sums for
    which `keep` is false are dropped first.
    """
    num_right = right.lengths[cells]
    starts = np.concatenate(([0], np.cumsum(left.lengths * num_right)))
    total = int(starts[-1])
    parts = [
        _sums(
            left, right, cells, starts, begin, min(begin + _CANDIDATES_AT_ONCE, total), limit, keep
        )
        for begin in range(0, max(total, 1), _CANDIDATES_AT_ONCE)
    ]
    return parts[0] if len(parts) == 1 else _merge(parts)


def _sums(
    left: Frontiers,
    right: Frontiers,
    cells: Ints,
    starts: Ints,
    begin: int,
    end: int,
    limit: int | None,
    keep: Keep | None,
) -> Frontiers:
    """The reduced frontiers of candidates `begin` to `end` of a product."""
    number = np.arange(begin, end)
    cell = np.searchsorted(starts, number, side="right") - 1
    i, j = np.divmod(number - starts[cell], right.lengths[cells][cell])
    i += left.starts[cell]
    j += right.starts[cells][cell]
    time, memory = left.time[i] + right.time[j], left.memory[i] + right.memory[j]
    starts = np.clip(starts, begin, end) - begin
    if keep is not None:
        kept = keep(cell, time, memory)
        starts = np.concatenate(([0], np.cumsum(kept)))[starts]
        i, j, time, memory = i[kept], j[kept], time[kept], memory[kept]
    return reduce(starts, time, memory, (*(row[i] for row in left.trace), j), limit)


def _merge(parts: Sequence[Frontiers]) -> Frontiers:
    """Union of tables of equally many frontiers, one by one."""
    cell = np.concatenate([np.repeat(np.arange(len(part)), part.lengths) for part in parts])
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=len(parts[0]))
    return reduce(
        np.concatenate(([0], np.cumsum(counts))),
        np.concatenate([part.time for part in parts])[order],
        np.concatenate([part.memory for part in parts])[order],
        [np.concatenate(rows)[order] for rows in zip(*(p.trace for p in parts), strict=True)],
    )
