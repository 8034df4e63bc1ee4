"""The frontier of a large problem, in seconds, with a certified gap.

Paper: the questions are TensorOpt's (arXiv 2004.10856); the answer is a sweep over weights for the
supported points (`sweep.py`), then mixtures in the gaps between them (`gap_heuristics.py`), single
changes (`local_search.py`), and the exact frontier up to a tolerance where that leaves wide gaps
(`gap_solver.py`).
Deviation: points between supported ones need not be optimal, and where the budget ends the last
step early they may be off by more than its tolerance. The lower bound limits the error.
Oracle: `eliminate.exact_frontier`, enumeration and a mixed-integer program.
Known inefficiency: see `sweep.py` and `gap_heuristics.py`.
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
from shardwright.solve.gaps.gap_heuristics import fill_gaps
from shardwright.solve.gaps.gap_solver import close_gaps
from shardwright.solve.gaps.local_search import local_search

_COARSER = 5  # factor on the resolution between supported points


@dataclass(frozen=True, slots=True)
class FastFrontier:
    """Good trade-offs, fastest first and memory strictly falling, with a lower bound.

    Without `pinned` nodes the first point is the fastest and the last the smallest assignment.
    `supported` is the frontier without points in gaps; None if there are none in this one.
    """

    points: tuple[Point, ...]
    bound: DualBound
    pinned: tuple[int, ...]
    supported: FastFrontier | None = None

    def lower_bound(self, memory_limit: float = math.inf) -> float:
        """Seconds that no assignment within `memory_limit` bytes can beat; inf if there is none."""
        return float(self.bound.at(memory_limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits on the work for a frontier.

    * `max_weights`, `seconds`: limits of the sweep; with `seconds` the result depends on the host;
    * `max_points`: points between the supported ones;
    * `max_table`: entries of a table at one weight, beyond which nodes are pinned;
    * `resolution`: gaps narrower than this fraction of time or memory are left open;
    * `max_priced`: terms that are priced for single changes;
    * `max_sums`: sums of points that are made to close wide gaps.
    """

    max_weights: int = 120
    seconds: float = math.inf
    max_points: int = 1000
    max_table: int = 500_000
    resolution: float = 0.0
    max_priced: int = 20_000_000
    max_sums: int = 2_000_000


FULL = Effort()


def fast_frontier(
    problem: Problem | Folded,
    effort: Effort = FULL,
    *,
    wanted: Callable[[DualBound], bool] = lambda bound: True,
    solver: Solver | None = None,
    prices: PriceList | None = None,
) -> FastFrontier:
    """Approximate the frontier of `problem`; exact at its ends and on its lower convex hull.

    * `wanted`: decides from the bound whether to look for points between the supported ones;
    * `solver`, `prices`: of the problem, if they exist already.

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
        max_weights=effort.max_weights,
        seconds=effort.seconds,
        max_table=effort.max_table,
        resolution=effort.resolution,
        solver=solver,
        prices=prices,
    )
    points = found.points
    supported = FastFrontier(points, found.bound, found.pinned)
    if not wanted(found.bound):
        return supported
    deadline, most = start + effort.seconds, effort.max_points
    if time.monotonic() < deadline:
        coarser = _COARSER * effort.resolution
        points = fill_gaps(prices, points, max_points=most, resolution=coarser)
        points = local_search(prices, points, max_points=most, max_priced=effort.max_priced)
    done = close_gaps(
        problem,
        points,
        found.points,
        found.bound,
        max_sums=effort.max_sums,
        deadline=deadline,
    )
    return FastFrontier(done.points, done.bound, found.pinned, supported)
