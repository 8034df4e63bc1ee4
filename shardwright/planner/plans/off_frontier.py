"""Plans off the additive frontier that fit a memory limit which faster frontier plans exceed.

The frontier contains the plans that no other plan dominates in time and *additive* memory. The
actual memory of a plan is simulated (`memory_refinement.py`), and its ratio to additive memory
differs between meshes. So the frontier may omit a plan that is dominated only in additive memory:
within a limit that it fits and the dominating plan exceeds by simulation, it is the better one.
This file tries the candidates of every mesh in order of time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import final

from shardwright.ir.frontier import MOST_PREFETCHED
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.deadline import NEVER, Deadline
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.far_ahead import far_ahead
from shardwright.planner.processes.foresight import Foresight

_TRIES = 24  # the most plans that are simulated by few layers
_WHOLE = 3  # as many tries is one that no few layers stand for
# Of a step: what is gathered too far ahead was never found to delay other messages for longer.
_TOO_FAR = 3e-2
_SPREAD = 1.1  # ratios of seconds of plans of one kind, within other limits, differ by less
_GAIN = 1e-2  # plans whose relative gain in time is smaller are not tried


_Queued = tuple[Seconds, int, Candidate]  # likely seconds, the number of its search


@dataclass
class _Group:
    """The candidates of one search, fastest first.

    `share` is the last known ratio of simulated to additive memory, and `slower` that of seconds,
    None if none is simulated. `again` marks the candidates of a second search (`bottlenecks.py`),
    which need less memory than others of equal additive memory, so that `share` may be too large
    for them.
    """

    left: list[Candidate]
    share: float
    again: bool
    slower: float | None = None

    def next(self, limit: Bytes, enough: Seconds) -> Candidate | None:
        """Remove and return the fastest candidate that is likely to fit, or None.

        If none of those faster than `enough` seconds is likely to fit, a second search offers the
        slowest of these once.
        """
        fits = (c for c in self.left if self.share * c.peak <= limit and c.may_fit(limit))
        likely = next(fits, None)
        if self.again:
            faster = [c for c in self.left if c.cost[0] < enough and c.may_fit(limit)]
            if faster and likely not in faster:
                likely = faster[-1]
        self.again = False
        if likely is not None:
            self.left.remove(likely)
        return likely


class _Slower:
    """The least ratios of seconds by kind, with as many buckets ahead as make a step faster.

    Another form of the graph may have memory for them. `before` has those of other limits.
    """

    def __init__(self, before: dict[Hashable, float]) -> None:
        self._before = before
        self._now: dict[Hashable, float] = {}

    def knows(self, candidate: Candidate) -> bool:
        """Whether another one of its kind was simulated within this limit."""
        return candidate.kind in self._now

    def likely(self, candidate: Candidate) -> float:
        """By how much a candidate is likely to take longer than by its table, at least."""
        before = self._before.get(candidate.kind, 1.0) / _SPREAD
        return max(1.0, before, self._now.get(candidate.kind, 1.0) / (1 + _GAIN))

    def learn(self, candidate: Candidate, ratio: float) -> float:
        """Keep the ratio of a candidate, and return it."""
        for known in (self._now, self._before):
            known[candidate.kind] = min(ratio, known.get(candidate.kind, ratio))
        return ratio


@final
class OffFrontierPlans:
    """The candidates of all meshes, on the frontier or not.

    `seconds`, `compare` and `deepen` are those of a simulation (`searched_frontier.py`). With
    `adds_up` the seconds of a plan are those of its candidate, so that only plans that are
    simulated are written. `foresight` simulates the next few at once.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        write: Callable[[Candidate], Plan],
        seconds: Callable[[Plan], Seconds],
        compare: Callable[[Plan], Plan],
        deepen: Callable[[Plan, Bytes | None], Plan],
        *,
        adds_up: bool = False,
        foresight: Foresight | None = None,
    ) -> None:
        by_search: dict[tuple[int, bool], list[Candidate]] = {}
        for candidate in candidates:
            by_search.setdefault((id(candidate.writer), candidate.again), []).append(candidate)
        self._by_search = [
            (again, sorted(found, key=lambda one: one.cost))
            for (_, again), found in by_search.items()
        ]
        self._write, self._adds_up, self._foresight = write, adds_up, foresight
        self._seconds, self._compare, self._deepen = seconds, compare, deepen
        self._plans: dict[int, Plan] = {}  # by the id of the candidate; what is simulated is kept
        # The least ratio of seconds by kind that calls before have found.
        self._slower: dict[Hashable, float] = {}

    def faster(
        self, limit: Bytes, than: Seconds, share: float, deadline: Deadline = NEVER
    ) -> Plan | None:
        """The fastest plan found that fits into `limit` and is faster than `than` seconds.

        Those whose likely time is not clearly less are not tried.

        Args:
            limit: bytes of simulated memory.
            than: seconds of the best plan so far.
            share: the initial estimate of the ratio of simulated to additive memory, which is then
                updated for each mesh.
            deadline: when no more are tried.

        Returns:
            The plan, or None if none is found within `_TRIES`.
        """
        best: Plan | None = None
        enough = Seconds(than / (1 + _GAIN))
        queue: list[_Queued] = []
        slower = _Slower(self._slower)
        groups = [_Group(list(found), share, again) for again, found in self._by_search]

        def likely(number: int, candidate: Candidate) -> Seconds:
            """Seconds that a simulation is likely to find; less if only other forms tell them."""
            seconds = candidate.cost[0] if self._adds_up else self._written(candidate).step_seconds
            known = groups[number].slower
            return Seconds((slower.likely(candidate) if known is None else known) * seconds)

        def add(number: int, candidate: Candidate) -> None:
            if (seconds := likely(number, candidate)) < enough:
                heapq.heappush(queue, (seconds, number, candidate))

        def offer(number: int) -> None:
            candidate = groups[number].next(limit, enough)
            if candidate is not None:
                add(number, candidate)

        for number in range(len(groups)):
            offer(number)
        tried = 0
        while tried < _TRIES and queue and queue[0][0] < enough and not deadline.is_over:
            seconds, number, candidate = heapq.heappop(queue)
            if seconds < likely(number, candidate):
                add(number, candidate)  # others of its kind were simulated since
                continue
            plan = self._written(candidate)
            if not slower.knows(candidate):  # else its likely time is known well enough
                self._expect(candidate, queue, _TRIES - tried, enough)
                least = (1 - _TOO_FAR) * self._seconds(far_ahead(plan))
                if least >= enough:  # so its memory does not matter
                    groups[number].slower = slower.learn(candidate, least / plan.step_seconds)
                    tried += 1
                    offer(number)
                    continue
            self._expect_deepened(candidate, queue, enough, limit)
            compared = self._compare(plan)
            tried += 1 if compared.timeline is None else _WHOLE
            groups[number].share = compared.peak_bytes / candidate.peak
            may_win = (1 - MOST_PREFETCHED) * compared.step_seconds < than
            if compared.peak_bytes <= limit and may_win:
                deepest = self._deepen(compared, None)
                slower.learn(candidate, deepest.step_seconds / plan.step_seconds)
                compared = self._deepen(compared, limit)
                if compared.step_seconds < than:
                    best, than = compared, compared.step_seconds
                    enough = Seconds(than / (1 + _GAIN))
            groups[number].slower = compared.step_seconds / plan.step_seconds
            offer(number)
        return best

    def _expect(
        self, candidate: Candidate, queue: Sequence[_Queued], tries: int, enough: Seconds
    ) -> None:
        """Simulate the time of a candidate at once with those of the `queue` that are next."""
        if self._foresight is None or self._foresight.width < 2:
            return
        if self._foresight.knows_seconds(far_ahead(self._written(candidate))):
            return
        few = islice(self._next(candidate, queue, enough), min(self._foresight.width, tries))
        self._foresight.expect(seconds=[far_ahead(plan) for plan in few])

    def _expect_deepened(
        self, candidate: Candidate, queue: Sequence[_Queued], enough: Seconds, limit: Bytes
    ) -> None:
        """Simulate a candidate at once with the next of which it is known that they may be faster.

        That is with their memory and with more buckets ahead.
        """
        if self._foresight is None or self._foresight.width < 2:
            return
        if self._foresight.knows(self._written(candidate)):
            return
        found = []
        for plan in self._next(candidate, queue, enough):
            far = far_ahead(plan)
            known = self._foresight.knows_seconds(far) and not self._foresight.knows(plan)
            if known and (1 - _TOO_FAR) * self._seconds(far) < enough:
                found.append(plan)
        self._foresight.expect(deepened=found[: self._foresight.width], limit=limit)

    def _next(
        self, candidate: Candidate, queue: Sequence[_Queued], enough: Seconds
    ) -> Iterator[Plan]:
        """The plan of a candidate, and the next of the `queue` that may be fast enough.

        Each is of another kind: the first of a kind may tell that others need no simulation.
        """
        first = {candidate.kind: candidate}
        for seconds, _, one in sorted(queue):
            if seconds < enough:
                first.setdefault(one.kind, one)
        return map(self._written, first.values())

    def _written(self, candidate: Candidate) -> Plan:
        """The plan of a candidate, built once."""
        if id(candidate) not in self._plans:
            self._plans[id(candidate)] = self._write(candidate)
        return self._plans[id(candidate)]
