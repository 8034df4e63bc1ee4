"""The frontier of a large problem, in seconds, with a certified gap.

Paper: the questions are TensorOpt's (arXiv 2004.10856); the answer is a sweep over weights for the
supported points (`sweep.py`), then mixtures in the gaps between them (`fill.py`), single changes
(`polish.py`), and the exact frontier up to a tolerance where that leaves wide gaps (`finish.py`).
Deviation: points between supported ones need not be optimal, and where the last step ends for want
of budget they may be off by more than its tolerance. The lower bound says by how much at most.
Oracle: `eliminate.exact_frontier`, enumeration and a mixed-integer program.
Known inefficiency: see `sweep.py` and `fill.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Point, Problem
from shardwright.solve.elimination.solver import Solver
from shardwright.solve.folding.folded import Folded
from shardwright.solve.frontier.sweep import DualBound, sweep
from shardwright.solve.gaps.gap_heuristics import fill
from shardwright.solve.gaps.gap_solver import finish
from shardwright.solve.gaps.local_search import polish

_COARSER = 5  # between supported points this much coarser gaps are filled


@dataclass(frozen=True, slots=True)
class FastFrontier:
    """Good trade-offs, fastest first and memory strictly falling, and what is proved about them.

    Without `pinned` nodes the first point is fastest and the last smallest of all assignments.
    """

    points: tuple[Point, ...]
    bound: DualBound
    pinned: tuple[int, ...]

    def lower_bound(self, memory_limit: float = math.inf) -> float:
        """Seconds that no assignment within `memory_limit` bytes can beat; inf if there is none."""
        return float(self.bound.at(memory_limit))


def fast_frontier(
    problem: Problem | Folded,
    *,
    max_weights: int = 120,
    seconds: float = math.inf,
    max_points: int = 1000,
    max_table: int = 500_000,
    resolution: float = 0.0,
    max_priced: int = 20_000_000,
    max_sums: int = 2_000_000,
    wanted: Callable[[DualBound], bool] = lambda bound: True,
    solver: Solver | None = None,
    prices: PriceList | None = None,
) -> FastFrontier:
    """Approximate the frontier of `problem`; exact at its ends and on its lower convex hull.

    `max_weights` and `seconds` bound the sweep, `max_points` the points between those it finds,
    `max_table` the entries of a table at one weight, beyond which nodes are pinned, `max_priced`
    the terms that are priced for single changes, and `max_sums` the work on gaps that are wide.
    Gaps narrower than `resolution`, as a part of time or memory, are left open. With `seconds` the
    result depends on the machine. What lies between supported points is looked for only if `wanted`
    says so of the bound. A `solver` and `prices` that are known already are not made again.
    Without a feasible assignment there are no points.

    >>> import numpy as np
    >>> from shardwright.solve.elimination.problem import Node
    >>> node = Node("a", np.array([1.0, 2.0]), np.array([30, 20]))
    >>> front = fast_frontier(Problem((node, node)))
    >>> [(p.time, p.memory) for p in front.points], round(front.lower_bound(45), 6)
    ([(2.0, 60), (3.0, 50), (4.0, 40)], 3.992)
    """
    start = time.monotonic()
    prices = prices or PriceList.of(problem)
    found = sweep(
        problem,
        max_weights=max_weights,
        seconds=seconds,
        max_table=max_table,
        resolution=resolution,
        solver=solver,
        prices=prices,
    )
    points = found.points
    if not wanted(found.bound):
        return FastFrontier(points, found.bound, found.pinned)
    if time.monotonic() - start < seconds:
        points = fill(prices, points, max_points=max_points, resolution=_COARSER * resolution)
        points = polish(prices, points, max_points=max_points, max_priced=max_priced)
    done = finish(
        problem, points, found.points, found.bound, max_sums=max_sums, deadline=start + seconds
    )
    return FastFrontier(done.points, done.bound, found.pinned)
