"""Lower bounds of the seconds of all plans of a search, by their peak memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.planner.plans.mesh_frontier import RESOLUTION
from shardwright.planner.space.space import Space
from shardwright.solve.frontier.sweep import sweep

BoundByBytes = Callable[[float], float]
_WEIGHTS = 14  # the fastest and the smallest plan, and a ladder of weights between


@dataclass
class MeshBound:
    """A lower bound of the seconds of the plans of one mesh, or of a few plans.

    Attributes:
        overhead: bytes that a plan needs beyond those that `at` is given.
        at: the bound, by bytes.
        closer: computes a closer bound, which takes a while; None if there is none.
    """

    overhead: int
    at: BoundByBytes
    closer: Callable[[], BoundByBytes] | None = None

    def seconds(self, peak: float) -> float:
        """The bound that is known, of plans within `peak` bytes."""
        return self.at(peak - self.overhead)

    def refine(self) -> None:
        """Compute the closer bound."""
        if self.closer is not None:
            known, closer, self.closer = self.at, self.closer(), None
            self.at = lambda memory: max(known(memory), closer(memory))


def least_seconds(
    bounds: Sequence[MeshBound], peak: float, most: float = math.inf, *, closer: bool = True
) -> float:
    """The least of `bounds` within `peak` bytes, or `most`; only those that decide are refined.

    None are without `closer`.
    """
    queue = [(one.seconds(peak), number) for number, one in enumerate(bounds)]
    heapq.heapify(queue)
    while queue and queue[0][0] < most:
        least, number = heapq.heappop(queue)
        one = bounds[number]
        if one.closer is None or not closer:
            return least
        one.refine()
        heapq.heappush(queue, (one.seconds(peak), number))
    return most


def hides_copies(bound: BoundByBytes, space: Space) -> BoundByBytes:
    """The bound on steps that hide all copies to the host and back, from `bound` with their cost.

    Without any copy a plan takes at least what all of them do with unlimited memory.
    """
    copies = space.most_copy_seconds
    return lambda memory: max(0.0, bound(memory) - copies, bound(math.inf))


def without_copies(space: Space) -> BoundByBytes:
    """The bound on plans of `space` whose copies to the host and back take no time."""
    found = sweep(space.folded_without_copies, max_weights=_WEIGHTS, resolution=RESOLUTION)
    return found.bound.at
