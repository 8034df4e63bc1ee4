"""Extends a frontier by changes of single nodes.

Paper: none of the four; Pareto local search (Paquete, Chiarandini and Stützle 2004).
Deviation: all changes of a point are priced at once, points are sampled evenly from the frontier,
and a budget of priced terms ends the search on large problems.
Complexity: O(terms · K) for each point that is tried. Oracle: `eliminate.exact_frontier`.
Known inefficiency: points that are dominated later may have been tried first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.solve.algebra.frontier import reduce
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Ints, Point, Problem
from shardwright.solve.folding.folded import Folded
from shardwright.solve.gaps.single_changes import Moves, num_touched_terms

_FEWEST = 8


def local_search(
    problem: Problem | Folded | PriceList,
    points: Sequence[Point],
    *,
    max_points: int = 1000,
    max_priced: int = 20_000_000,
) -> tuple[Point, ...]:
    """Improve the frontier `points` by single changes, repeatedly.

    Ends when no change improves it, at `max_points` points, or after `max_priced` priced terms;
    does not start where these suffice for a few points only.
    """
    prices = PriceList.of(problem)
    left = max_priced // num_touched_terms(prices)  # points that can still be tried
    if left < _FEWEST:
        return tuple(points)
    moves = Moves.of(prices)
    tried: set[tuple[float, int]] = set()
    front = tuple(points)
    while left > 0 and len(front) < max_points:
        fresh = [point for point in front if point[:2] not in tried]
        fresh = [fresh[i] for i in _evenly(len(fresh), left)]
        if not fresh:
            break
        left -= len(fresh)
        tried.update(point[:2] for point in fresh)
        blocks = [_better(prices, moves, point, front) for point in fresh]
        front = _joined(prices, front, blocks, max_points)
    return front


def _evenly(length: int, most: int) -> Ints:
    """At most `most` of `length` indices, evenly spaced, ends included."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(np.int64))


def _better(prices: PriceList, moves: Moves, point: Point, front: Sequence[Point]) -> Ints:
    """The best single changes of `point` that no point of `front` beats or equals: (A, nodes)."""
    start = np.array(point.choice, np.int64)
    more_time, more_memory = moves.costs(prices, start)
    time, memory = point.time + more_time, point.memory + more_memory
    times = np.array([p.time for p in front])
    memories = np.array([np.inf, *(p.memory for p in front)])
    needed = memories[np.searchsorted(times, time * (1 + 1e-12), side="right")]
    good = np.flatnonzero((memory < needed) & np.isfinite(time))
    ends = np.array([0, len(good)])
    good = reduce(ends, time[good], memory[good].astype(np.int64), (good,)).trace[0]
    rows = np.tile(start, (len(good), 1))
    rows[np.arange(len(good)), moves.node[good]] = moves.choice[good]
    return rows


def _joined(
    prices: PriceList, front: Sequence[Point], blocks: Sequence[Ints], max_points: int
) -> tuple[Point, ...]:
    """The frontier of `front` and `blocks`, with at most `max_points` points."""
    old = {point[:2] for point in front}
    whole = best_points(prices, [np.array([p.choice for p in front], np.int64), *blocks])
    new = [i for i, point in enumerate(whole) if point[:2] not in old]
    room = set(np.array(new, np.int64)[_evenly(len(new), max_points - len(front))].tolist())
    return tuple(p for i, p in enumerate(whole) if i in room or p[:2] in old)
