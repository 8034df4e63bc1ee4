"""Plans off the additive frontier that fit a memory limit which faster frontier plans exceed.

The frontier keeps the plans that no other plan beats in time and in *additive* memory. The memory
that a plan needs is found by simulation (`memory_refinement.py`); its ratio to additive memory
differs between meshes. So a plan may be beaten by one of another mesh that needs less additive and
more simulated memory: within a limit between the two it is the better one. This file tries the
candidates of every mesh, the fastest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.mesh_loop import Candidate

_TRIES = 8  # plans that are simulated, which takes up to a second each
_GAIN = 1e-2  # plans that are faster by less are not tried


@dataclass
class _MeshCandidates:
    """The remaining candidates of one mesh, fastest first."""

    left: list[Candidate]
    share: float  # the last known ratio of settled to additive memory

    def next(self, limit: Bytes) -> Candidate | None:
        """Remove and return the fastest candidate that is likely to fit; drop those before it."""
        while self.left:
            candidate = self.left.pop(0)
            likely = self.share * candidate.peak
            if max(likely, min(candidate.least, candidate.peak)) <= limit:
                return candidate
        return None


@final
class OffFrontierPlans:
    """The candidates of all meshes, on the frontier or not."""

    def __init__(
        self,
        candidates: Iterable[Candidate],
        write: Callable[[Candidate], Plan],
        settle: Callable[[Plan], Plan],
    ) -> None:
        by_mesh: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            by_mesh.setdefault(id(candidate.writer), []).append(candidate)
        self._by_mesh: Sequence[list[Candidate]] = [
            sorted(candidates_of_mesh, key=lambda one: one.cost)
            for candidates_of_mesh in by_mesh.values()
        ]
        self._write, self._settle = write, settle

    def faster(self, limit: Bytes, than: Seconds, share: float) -> Plan | None:
        """The fastest plan found that fits into `limit` and is clearly faster than `than` seconds.

        Args:
            limit: bytes of settled memory.
            than: seconds of the best plan so far.
            share: a first estimate of the ratio of settled to additive memory; each mesh then has
                its own.

        Returns:
            The plan, or None if none is found within `_TRIES` simulations.
        """
        enough = than / (1 + _GAIN)
        queue: list[tuple[Seconds, int, Candidate, Plan]] = []
        by_mesh = [_MeshCandidates(list(candidates), share) for candidates in self._by_mesh]

        def offer(number: int) -> None:
            candidate = by_mesh[number].next(limit)
            if candidate is None:
                return
            plan = self._write(candidate)
            if plan.step_seconds < enough:
                heapq.heappush(queue, (plan.step_seconds, number, candidate, plan))

        for number in range(len(by_mesh)):
            offer(number)
        for _ in range(_TRIES):
            if not queue:
                break
            _, number, candidate, plan = heapq.heappop(queue)
            settled = self._settle(plan)
            if settled.peak_bytes <= limit:
                return settled
            by_mesh[number].share = settled.peak_bytes / candidate.peak
            offer(number)
        return None
