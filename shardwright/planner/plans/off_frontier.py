"""Plans off the additive frontier that fit a memory limit which faster frontier plans exceed.

The frontier keeps the plans that no other plan beats in time and in *additive* memory. The memory
that a plan needs is found by simulation (`memory_refinement.py`); its ratio to additive memory
differs between meshes. So a plan may be beaten by one of another mesh that needs less additive and
more simulated memory: within a limit between the two it is the better one. This file tries the
candidates of every mesh, the fastest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.plans.candidate import Candidate

_TRIES = 8  # plans that are simulated
_GAIN = 1e-2  # plans that are faster by less are not tried


@dataclass
class _Group:
    """The candidates of one search, fastest first.

    `again` says that it was a second search (`bottlenecks.py`), whose plans need less than others
    of the same sum: `share`, the last known ratio of settled to additive memory, may be too large.
    """

    left: list[Candidate]
    share: float
    again: bool

    def next(self, limit: Bytes, enough: Seconds) -> Candidate | None:
        """Remove and return the fastest candidate that is likely to fit, or None.

        Of a second search that has none among those that take less than `enough` seconds, it is
        the last of these.
        """
        may = [c for c in self.left if min(c.least, c.peak) <= limit]
        likely = next((c for c in may if self.share * c.peak <= limit), None)
        faster = [c for c in may if c.cost[0] < enough]
        if self.again and faster and likely not in faster:
            likely = faster[-1]
        self.again = False
        if likely is not None:
            self.left.remove(likely)
        return likely


@final
class OffFrontierPlans:
    """The candidates of all meshes, on the frontier or not."""

    def __init__(
        self,
        candidates: Iterable[Candidate],
        write: Callable[[Candidate], Plan],
        compare: Callable[[Plan], Plan],
    ) -> None:
        by_search: dict[tuple[int, bool], list[Candidate]] = {}
        for candidate in candidates:
            by_search.setdefault((id(candidate.writer), candidate.again), []).append(candidate)
        self._by_search = [
            (again, sorted(found, key=lambda one: one.cost))
            for (_, again), found in by_search.items()
        ]
        self._write, self._compare = write, compare

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
        best: Plan | None = None
        enough = Seconds(than / (1 + _GAIN))
        queue: list[tuple[Seconds, int, Candidate, Plan]] = []
        groups = [_Group(list(found), share, again) for again, found in self._by_search]

        def offer(number: int) -> None:
            candidate = groups[number].next(limit, enough)
            if candidate is None:
                return
            plan = self._write(candidate)
            if plan.step_seconds < enough:
                heapq.heappush(queue, (plan.step_seconds, number, candidate, plan))

        for number in range(len(groups)):
            offer(number)
        for _ in range(_TRIES):
            while queue and queue[0][0] >= enough:
                heapq.heappop(queue)
            if not queue:
                break
            _, number, candidate, plan = heapq.heappop(queue)
            compared = self._compare(plan)
            if compared.peak_bytes <= limit:
                best, enough = compared, Seconds(compared.step_seconds / (1 + _GAIN))
            groups[number].share = compared.peak_bytes / candidate.peak
            offer(number)
        return best
