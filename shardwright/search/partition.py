"""A chain cut into stages so that a pipeline through them is fastest.

A step of M micro-batches takes as long as M of them in the slowest stage and
one in each of the others: (M - 1)/M · max + 1/M · sum of what the stages take.
With the slowest limited to a bound the sum is a shortest path, O(P · C²) for P
stages and C places to cut; bounds are tried from the smallest that is possible.

Paper: the stage partition of Alpa (arXiv 2201.12023), section 5.2.
Deviation: stages have costs of their own, as those at the front keep more activations; where there
are many bounds only some are tried.
Oracle: enumeration over all cuts.
"""

from __future__ import annotations

import numpy as np

from shardwright.search.problem import Bools, Floats

_EVERY_BOUND = 200
_BOUNDS = (1.0, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5, np.inf)


def objective(costs: list[float], micro_batches: int) -> float:
    """What stages that take `costs` seconds a step take together.

    >>> objective([4.0, 2.0], 2)
    5.0
    """
    return ((micro_batches - 1) * max(costs) + sum(costs)) / micro_batches


def partition(costs: Floats, micro_batches: int) -> tuple[int, ...] | None:
    """Where to cut, C numbers of places without both ends; None if it cannot be.

    `costs[s, a, b]` is what stage s takes from place a to place b, (P, C, C),
    infinite if it may not be.
    """
    count, places, _ = costs.shape
    costs = np.where(np.triu(np.ones((places, places), bool), 1), costs, np.inf)
    least = _smallest_bound(costs)
    if not np.isfinite(least):
        return None
    bounds = np.unique(costs[np.isfinite(costs) & (costs >= least)])
    if len(bounds) > _EVERY_BOUND:
        bounds = np.array([least * factor for factor in _BOUNDS])
    best: tuple[float, tuple[int, ...]] | None = None
    for bound in bounds.tolist():
        if best is not None and (micro_batches - 1) * bound / micro_batches >= best[0]:
            break
        found = _shortest(costs, costs <= bound)
        if found is not None:
            ends = (0, *found, places - 1)
            taken = [float(costs[s, ends[s], ends[s + 1]]) for s in range(count)]
            value = objective(taken, micro_batches)
            if best is None or value < best[0]:
                best = value, found
    return best[1] if best else None


def _smallest_bound(costs: Floats) -> float:
    """The least that the slowest stage can take."""
    reach = costs[0, 0]
    for stage in costs[1:]:
        reach = np.maximum(reach[:, None], stage).min(axis=0)
    return float(reach[-1])


def _shortest(costs: Floats, allowed: Bools) -> tuple[int, ...] | None:
    """Cuts of the smallest sum, of stages that are allowed."""
    masked = np.where(allowed, costs, np.inf)
    reach, steps = masked[0, 0], []
    for stage in masked[1:]:
        ways = reach[:, None] + stage
        steps.append(ways.argmin(axis=0))
        reach = ways.min(axis=0)
    if not np.isfinite(reach[-1]):
        return None
    found = [len(reach) - 1]
    for step in reversed(steps):
        found.append(int(step[found[-1]]))
    return tuple(reversed(found[1:]))
