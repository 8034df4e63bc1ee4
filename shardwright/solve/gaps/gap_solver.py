"""Solves gaps of the frontier exactly, up to a tolerance, within a budget.

With few large decisions, wide gaps lie between supported points; no weight finds their optima, and
few mixtures do. In such a gap, at the weight at which its ends tie, choices whose min-marginal lies
outside the open region are removed, and the frontier of the remaining problem is computed with
pruning (`pruned.py`); first with a coarse tolerance, because better points shrink the region.

Paper: the two phases of bi-objective optimisation (Ulungu and Teghem 1995); variable fixing by
reduced costs.
Deviation: points within a tolerance are not distinguished.
Complexity: exponential at worst; `max_sums` bounds the sums of points that are made.
Oracle: `eliminate.exact_frontier` and a mixed-integer program.
Known inefficiency: folded problems are unfolded, so deep ones are skipped; their gaps are narrow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np

from shardwright.solve.algebra.minplus import Objectives, forward, weighted
from shardwright.solve.algebra.pruned import (
    SUMS_PER_STEP,
    Budget,
    BudgetExceededError,
    assignments_in_region,
    without_excluded_choices,
)
from shardwright.solve.algebra.region import DominatedRegion, corners_below
from shardwright.solve.elimination.merged import Merged, merge
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Ints, Point, Problem
from shardwright.solve.elimination.schedule import EliminationSchedule, Join, make_schedule
from shardwright.solve.folding.folded import Folded
from shardwright.solve.frontier.sweep import DualBound

_COARSER = (5.0, 1.0)  # successive tolerances, in units of the requested one
_WEIGHTS = 8  # objectives for pruning inside the gaps, beside some outside
_BELOW, _ABOVE = np.array([0.15, 0.5]), np.array([2.0, 7.0])
_PARTS = 16  # several gaps together may use one such part of the budget
_RUNS = 3  # passes over all nodes that closing a gap takes at least
_ENTRIES_PER_SUM = 32  # table entries computed in the time of one sum of points
_TABLE = 250_000  # entries of a table at one weight, at most
_STAND_INS = 0.5  # fraction of a tolerance that thinning may use up

_Gap = tuple[Point, Point]  # two supported points, the faster first
_Small = tuple[Problem, list[Ints]]  # a reduced problem, and the remaining choices of each node


class BoundedFrontier(NamedTuple):
    """A frontier, fastest first, and a lower bound on its time."""

    points: tuple[Point, ...]
    bound: DualBound


def close_gaps(
    problem: Problem | Folded,
    points: Sequence[Point],
    supported: Sequence[Point],
    bound: DualBound,
    *,
    tolerance: float = 4e-3,
    max_sums: int = 20_000_000,
    deadline: float = math.inf,
) -> BoundedFrontier:
    """Close the gaps of a frontier to `tolerance`, a fraction of the time, the widest first.

    `supported` are the `points` on the lower convex hull. Stops after `max_sums` sums of points,
    and begins no gap after `deadline` on the monotonic clock; the other gaps stay open.
    """
    current = BoundedFrontier(tuple(points), bound)
    folded = Folded.of(problem)
    steps = _RUNS * folded.num_nodes
    if len(supported) < 2 or steps * SUMS_PER_STEP > max_sums or time.monotonic() > deadline:
        return current
    if all(_largest_gain(current, *gap) <= tolerance for gap in pairwise(supported)):
        return current
    whole = folded.unfolded()
    merged = merge(Folded(whole))
    schedule = make_schedule(merged.folded.problem, _TABLE)
    if schedule.pinned:
        return current
    work = _GapSolver(merged, schedule, PriceList.of(whole), Budget(max_sums), deadline)
    for coarser in _COARSER:
        current = work.close(current, tuple(pairwise(supported)), tolerance * coarser)
    return current


@final
class _GapSolver:
    """Closes gaps of one problem, with merged nodes, within a budget."""

    def __init__(
        self,
        merged: Merged,
        schedule: EliminationSchedule,
        prices: PriceList,
        budget: Budget,
        deadline: float,
    ) -> None:
        self.merged = merged
        self.problem = merged.folded.problem
        self.schedule = schedule
        self.prices = prices
        self.budget = budget
        self.most = budget.left // _PARTS  # for several gaps together
        self.deadline = deadline

    def close(
        self, current: BoundedFrontier, gaps: Sequence[_Gap], tolerance: float
    ) -> BoundedFrontier:
        """Close all `gaps` together, or one by one if that exceeds its part of the budget."""
        width = {gap: _largest_gain(current, *gap) for gap in gaps}
        gaps = sorted(
            (g for g in gaps if width[g] > tolerance * _STAND_INS), key=lambda g: -width[g]
        )
        if not gaps or time.monotonic() > self.deadline:
            return current
        before = self.budget.left
        self.budget.left = min(before, self.most if len(gaps) > 1 else before)
        spared = before - self.budget.left
        try:
            return self._close(current, gaps, tolerance)
        except BudgetExceededError:
            self.budget.left = 0
        finally:
            self.budget.left += spared
        if len(gaps) > 1:
            for gap in gaps:
                current = self.close(current, [gap], tolerance)
        return current

    def _close(
        self, current: BoundedFrontier, gaps: Sequence[_Gap], tolerance: float
    ) -> BoundedFrontier:
        """Find the points in the gaps that improve the frontier by more than `tolerance`."""
        given_away = _STAND_INS * tolerance
        corners = [
            corners_below(_points_between(current, gap), tolerance - given_away) for gap in gaps
        ]
        corner_time = np.concatenate([seconds for seconds, _ in corners])
        corner_memory = np.concatenate([memory for _, memory in corners])
        open_ones = current.bound.bounds_at(corner_memory) < corner_time
        corner_time, corner_memory = corner_time[open_ones], corner_memory[open_ones]
        weights = np.array([_weight(gap) for gap in gaps])[:: -(-len(gaps) // _WEIGHTS)]
        around = np.concatenate(([0.0], weights.min() * _BELOW, weights, weights.max() * _ABOVE))
        small: _Small | None = self.problem, [np.arange(k) for k in self.problem.sizes]
        schedule: EliminationSchedule | None = self.schedule
        for objectives in (
            weighted(weights),
            Objectives(np.append(np.ones(len(around)), 0.0), np.append(around, 1.0)),
        ):
            region = DominatedRegion(objectives, corner_time, corner_memory)
            if small is not None:
                small = self._reduced(small, schedule, region)
                schedule = None
        slack = 0.0
        points = current.points
        if small is not None:
            rest, kept = small
            inside = assignments_in_region(rest, region, given_away * min(corner_time), self.budget)
            slack = inside.slack
            if len(inside.assignments):
                found = [choices[inside.assignments[:, i]] for i, choices in enumerate(kept)]
                before = np.array([p.choice for p in points], np.int64)
                new = self.merged.expand(np.stack(found, axis=1))
                points = best_points(self.prices, [before, new])
        sure = (1 - tolerance + given_away) * (1 - 1e-9)
        done = BoundedFrontier(points, current.bound)
        proved = [
            (fast.memory - 1, small.time * sure - slack)
            for gap in gaps
            for fast, small in pairwise(_points_between(done, gap))
        ]
        return BoundedFrontier(points, current.bound.with_proved(proved))

    def _reduced(
        self, small: _Small, schedule: EliminationSchedule | None, region: DominatedRegion
    ) -> _Small | None:
        problem, kept = small
        schedule = schedule or make_schedule(problem, _TABLE)
        if schedule.pinned:
            raise BudgetExceededError
        entries = _entries(schedule) * len(region.objectives)
        self.budget.spend(entries // _ENTRIES_PER_SUM + len(schedule.steps) * SUMS_PER_STEP)
        tables = forward(schedule, region.objectives)
        found = without_excluded_choices(problem, schedule, tables, region)
        if found is None:
            return None
        return found[0], [old[new] for old, new in zip(kept, found[1], strict=True)]


def _points_between(current: BoundedFrontier, gap: _Gap) -> list[Point]:
    """The points from one supported point to the next, ends included."""
    left, right = gap
    return [p for p in current.points if left.time <= p.time <= right.time]


def _weight(gap: _Gap) -> float:
    """The weight at which both ends tie."""
    left, right = gap
    return (right.time - left.time) / (left.memory - right.memory)


def _largest_gain(current: BoundedFrontier, left: Point, right: Point) -> float:
    """The largest fraction of time that may still be saved between two supported points."""
    stairs = _points_between(current, (left, right))
    if len(stairs) < 2:
        return 0.0
    limits = np.array([p.memory - 1 for p in stairs[:-1]], np.int64)
    return float((1 - current.bound.bounds_at(limits) / [p.time for p in stairs[1:]]).max())


def _entries(schedule: EliminationSchedule) -> int:
    """Entries of the inputs of a schedule's outsides, for one objective."""
    total = 0
    for step in schedule.steps:
        join = schedule.tables[schedule.factors[step.output].table]
        assert isinstance(join, Join), "a step computes its output"
        total += math.prod(join.sizes) * len(step.inputs) ** 2
    return total
