"""Plans off the additive frontier that fit a memory limit which faster frontier plans exceed.

The frontier keeps what nothing beats in time and in memory that *adds up*. What a plan really needs
is settled by a walk (`memories.py`), and is another share of that on every mesh. So a plan may be
beaten by one of another mesh that needs less by the tables and more when settled: within a limit
between the two it is the better one. Here every mesh's candidates are asked, the fastest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.mesh_loop import Candidate

_TRIES = 8  # plans whose memory is settled; each takes a while
_GAIN = 1e-2  # a plan that is faster by less is not worth a try


@dataclass
class _MeshCandidates:
    """What is left of the candidates of one mesh, fastest first."""

    left: list[Candidate]
    share: float  # settled memory in that which adds up, as far as it is known

    def next(self, limit: Bytes) -> Candidate | None:
        """The fastest that is likely to fit; it is taken out, and so are those before it."""
        while self.left:
            candidate = self.left.pop(0)
            likely = self.share * candidate.peak
            if max(likely, min(candidate.least, candidate.peak)) <= limit:
                return candidate
        return None


@final
class OffFrontierPlans:
    """The candidates of all meshes, of which few are on the frontier."""

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

        `share` is that of settled memory in what adds up of plans that are known, for a start; each
        mesh then has its own. None where no plan is found, or where too many were tried.
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
