"""Supported points of the frontier and a lower bound, from a sweep over weights.

Paper: none of the four; parametric search over Lagrange multipliers (Everett 1963; Aneja and Nair
1979 for the refinement). The elimination underneath is that of TensorOpt / FT (arXiv 2004.10856).
A weight λ (seconds per byte) asks for the least `time + λ · memory`. Its minimiser is a vertex of
the frontier's lower convex hull, and for any memory limit M no assignment within M is faster than
`minimum(λ) − λ · M`.
Deviation: many weights per pass. Between two neighbours on the hull the next weight is the one at
which they tie: either something beats both and is new, or nothing lies below their line.
Complexity: one elimination for each weight, in passes of 24; V vertices take 2 V weights.
Oracle: the lower convex hull of `tests/harness/oracles.py::enumerate_problem`.
Known inefficiency: the passes before the hull has 24 gaps have few weights each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardwright.solve.algebra.minplus import extreme_objectives, weighted
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Floats, Ints, Point, Problem
from shardwright.solve.elimination.solver import Solver, make_solver
from shardwright.solve.folding.folded import Folded

_WEIGHTS_AT_ONCE = 24
_TABLE_BYTES = 400_000_000  # all tables of one pass
_LADDER, _LADDER_SPAN = 12, 300.0  # weights of the first pass, around that of the ends
_TIE = 1e-12  # values this close, relatively, are equal

_Gap = tuple[float, int, float, int]  # the prices of two neighbours on the hull


@dataclass(frozen=True, slots=True)
class DualBound:
    """Lower bounds on the time at any memory limit: the best of the lines `value − weight · limit`.

    `least_memory` is a lower bound of the memory of every assignment. `proved` has pairs of a
    limit in bytes and a lower bound in seconds within it, from other sources.
    """

    lines: tuple[tuple[float, float], ...]  # (weight, value)
    least_memory: int
    proved: tuple[tuple[int, float], ...] = ()  # (bytes, seconds)

    def at(self, memory_limit: float) -> float:
        """Seconds that no assignment within `memory_limit` bytes can beat; inf if there is none.

        >>> DualBound(((0.0, 5.0), (0.5, 9.0)), least_memory=2).at(6)
        6.0
        """
        if memory_limit < self.least_memory:
            return math.inf
        if math.isinf(memory_limit):
            return max(value for weight, value in self.lines if weight == 0)
        proved = (seconds for limit, seconds in self.proved if limit >= memory_limit)
        return max(0.0, *proved, *(v - weight * memory_limit for weight, v in self.lines))

    def bounds_at(self, limits: Ints) -> Floats:
        """The bounds at many finite limits: (N,)."""
        weight, value = np.array(self.lines).T
        found = np.maximum(0.0, (value[:, None] - np.multiply.outer(weight, limits)).max(axis=0))
        order = sorted(self.proved)
        if order:
            known, seconds = (np.array(column) for column in zip(*order, strict=True))
            best = np.append(np.maximum.accumulate(seconds[::-1])[::-1], 0.0)
            found = np.maximum(found, best[np.searchsorted(known, limits)])
        return np.where(limits < self.least_memory, np.inf, found)

    def with_proved(self, proved: Iterable[tuple[int, float]]) -> DualBound:
        """This bound with more pairs in `proved`."""
        return replace(self, proved=(*self.proved, *proved))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Supported points, fastest first, and the bound that their weights prove.

    Without `pinned` nodes every point is on the lower convex hull of the frontier, the first is
    fastest and the last smallest. With them points need not be optimal; the bound holds either way.
    `complete`: the points are all vertices of the hull.
    """

    points: tuple[Point, ...]
    bound: DualBound
    pinned: tuple[int, ...]
    complete: bool


def sweep(
    problem: Problem | Folded,
    *,
    max_weights: int = 120,
    seconds: float = math.inf,
    max_table: int = 500_000,
    resolution: float = 0.0,
    solver: Solver | None = None,
    prices: PriceList | None = None,
) -> Sweep:
    """Find the vertices of the frontier's lower convex hull, the widest gaps first.

    A gap between neighbours is skipped if they differ by no more than the fraction `resolution` of
    time or memory, or if the bound allows no larger gain.

    It ends when all vertices are found, after about `max_weights` weights, or after `seconds`; only
    the last makes the result depend on the host. `max_table` bounds the entries of a table at one
    weight; beyond it nodes are pinned. `solver` and `prices` of the problem may be passed if they
    exist already. Without a feasible assignment there are no points.
    """
    deadline = time.monotonic() + seconds
    folded = Folded.of(problem)
    search = _WeightedSearch(
        folded, solver or make_solver(folded, max_table), prices or PriceList.of(folded)
    )
    hull = search.ends()
    pinned = search.solver.pinned
    if not hull:
        return Sweep((), search.bound(), pinned, not pinned)
    closed: set[_Gap] = set()
    spent = 0
    if len(hull) > 1 and max_weights > _LADDER and time.monotonic() <= deadline:
        chord = _tie_weight(hull[0], hull[-1])
        ladder = chord * np.geomspace(1 / _LADDER_SPAN, _LADDER_SPAN, _LADDER)
        hull, spent = _convex([*hull, *search.minimisers(ladder)]), _LADDER
    while gaps := search.widest(hull, closed, resolution)[: max_weights - spent]:
        if time.monotonic() > deadline:
            break
        gaps = gaps[:_WEIGHTS_AT_ONCE]
        spent += len(gaps)
        found = search.minimisers(np.array([_tie_weight(*gap) for gap in gaps]))
        for (left, right), point in zip(gaps, found, strict=True):
            closed.add(_gap(left, right))
            if _is_below(point, left, right):
                hull.append(point)
        hull = _convex(hull)
    complete = not pinned and not search.widest(hull, closed, 0.0)
    return Sweep(tuple(hull), search.bound(), pinned, complete)


class _WeightedSearch:
    """Minimises one problem at weights, and collects the bounds that follow."""

    def __init__(self, problem: Folded, solver: Solver, prices: PriceList) -> None:
        self.problem = problem
        self.solver = solver
        self.prices = prices
        self.lines: list[tuple[float, float]] = []
        self.least_memory = 0
        self.rows = max(1, min(_WEIGHTS_AT_ONCE, _TABLE_BYTES // (8 * self.solver.entries)))
        # A sum of n terms is off by at most n − 1 roundings; the bound must not be too high.
        self.slack = (len(self.prices.offset) + 4) * float(np.finfo(np.float64).eps)

    def ends(self) -> list[Point]:
        """The fastest and the smallest point; one if they are equal, none if all is forbidden."""
        values, choice = self.solver.minimise(extreme_objectives(*self.problem.most))
        if np.isfinite(values[1]):
            self.least_memory = int(values[1])
        self.lines.append((0.0, float(values[0] * (1 - self.slack))))
        return list(best_points(self.prices, [choice]))

    def minimisers(self, weights: Floats) -> Iterator[Point]:
        """A point that minimises `time + weight * memory`, for each weight."""
        for begin in range(0, len(weights), self.rows):
            part = weights[begin : begin + self.rows]
            values, choice = self.solver.minimise(weighted(part))
            values *= 1 - self.slack
            self.lines += zip(part.tolist(), values.tolist(), strict=True)
            yield from self.prices.points(choice)

    def widest(
        self, hull: list[Point], closed: set[_Gap], resolution: float
    ) -> list[tuple[Point, Point]]:
        """The open gaps between neighbours, the one with the largest possible gain first."""
        lines = np.array(sorted(set(self.lines)))
        open_ones = []
        for a, b in pairwise(hull):
            wide = b.time > a.time * (1 + resolution) and a.memory > b.memory * (1 + resolution)
            if wide and _gap(a, b) not in closed:
                won = _largest_gain(a, b, lines)
                if resolution == 0 or won > resolution:
                    open_ones.append((-won, a, b))
        return [(a, b) for _, a, b in sorted(open_ones, key=lambda gap: gap[0])]

    def bound(self) -> DualBound:
        return DualBound(tuple(sorted(self.lines)), self.least_memory)


def _tie_weight(left: Point, right: Point) -> float:
    return (right.time - left.time) / (left.memory - right.memory)


def _is_below(point: Point, left: Point, right: Point) -> bool:
    """Whether `point` is strictly below the line through two neighbours, and between them."""
    weight = _tie_weight(left, right)
    line = left.time + weight * left.memory
    between = right.memory < point.memory < left.memory
    return between and point.time + weight * point.memory < line * (1 - _TIE)


def _largest_gain(left: Point, right: Point, lines: Floats) -> float:
    """The largest gain between two neighbours that a bound of `lines` (weight, value) allows.

    As a fraction of the time, at least zero. Lines are sorted by weight, (N, 2).
    """
    weight, value = lines.T
    steps = np.diff(weight) > 0
    crossings = (np.diff(value)[steps] / np.diff(weight)[steps]).clip(right.memory, left.memory)
    bound = (value - np.multiply.outer(crossings, weight)).max(axis=1)
    line = left.time + _tie_weight(left, right) * (left.memory - crossings)
    return float(((line - bound) / line).max(initial=0.0))


def _gap(left: Point, right: Point) -> _Gap:
    return left.time, left.memory, right.time, right.memory


def _convex(points: list[Point]) -> list[Point]:
    """The points on the lower convex hull, fastest first, with those in the interior of a side."""
    hull: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time, p.memory)):
        if hull and point.memory >= hull[-1].memory:
            continue
        while len(hull) > 1 and _tie_weight(hull[-2], hull[-1]) > _tie_weight(hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull
