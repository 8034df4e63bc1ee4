"""Searches the frontier of one mesh, exactly or approximately."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardwright.planner.space.space import Space
from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier.fast import Effort, FastFrontier, fast_frontier
from shardwright.solve.frontier.sweep import DualBound

RESOLUTION = 1e-3  # plans whose relative differences in time and memory are smaller count as one
_POINTS = 64
_WEIGHTS = 40
_PRICED = 1_000_000
_SUMS = 500_000


def mesh_frontier(
    space: Space,
    exact: bool,
    seconds: float,
    wanted: Callable[[DualBound], bool],
    weights: int = _WEIGHTS,
    known: FastFrontier | None = None,
    *,
    points: int = 0,
) -> tuple[list[Point], Callable[[float], float], tuple[str, ...]]:
    """Points of one mesh, a lower bound of the seconds by memory, and notes for its plans.

    `known` is the approximate frontier, if it was computed before. It has `points` at least, where
    there are as many.
    """
    if exact:
        result = exact_frontier(space.folded.unfolded())
        every = list(result.points)

        def best(limit: float) -> float:
            return min((p.time for p in every if p.memory <= limit), default=math.inf)

        return every, best, _pinned(space, result.pinned)
    fast = None if known is None else _wanted_of(known, wanted)
    if fast is None:
        fast = approximate(space, seconds, wanted, weights, points=points)
    return list(fast.points), fast.lower_bound, _pinned(space, fast.pinned)


def _wanted_of(known: FastFrontier, wanted: Callable[[DualBound], bool]) -> FastFrontier | None:
    """The frontier with points in gaps if these are `wanted`; None if it is not known."""
    supported = known.supported or known
    if not wanted(supported.bound):
        return supported
    return None if known.supported is None else replace(known, supported=None)


def approximate(
    space: Space,
    seconds: float,
    wanted: Callable[[DualBound], bool],
    weights: int = _WEIGHTS,
    *,
    points: int = 0,
) -> FastFrontier:
    """The approximate frontier of one mesh, with points in gaps if they are `wanted`."""
    return fast_frontier(
        space.folded,
        Effort(
            max_weights=weights,
            max_points=max(_POINTS, points),
            seconds=seconds,
            resolution=RESOLUTION,
            max_priced=_PRICED,
            max_sums=_SUMS,
        ),
        wanted=wanted,
        solver=space.solver,
        prices=space.prices,
    )


def _pinned(space: Space, nodes: tuple[int, ...]) -> tuple[str, ...]:
    if not nodes:
        return ()
    like = space.folded.node_tables()
    names = list(dict.fromkeys(space.problem.nodes[like[i]].name for i in nodes))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    shown = ", ".join(names[:5])
    return (f"the graph is too wide to search exactly; pinned heuristically: {shown}{more}",)
