"""Simulates several plans at once that a choice is about to compare one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.plans.simulated.refinement import Refinement, Simulated
from shardwright.planner.processes.forked_map import ForkedMap


class _Task(NamedTuple):
    """A plan to simulate: its seconds alone, or time and memory, also with more buckets ahead."""

    plan: Plan
    only_seconds: bool = False
    deepens: bool = False
    limit: Bytes | None = None


@final
class Foresight:
    """Fills refinements in processes; `of` gives that of a plan.

    They keep what is found. Results are those that they find alone, so what is expected in vain
    only takes time.
    """

    def __init__(self, of: Callable[[Plan], Refinement], processes: int) -> None:
        self._of = of
        self._known: dict[int, Refinement] = {}
        self._map = ForkedMap(processes, self._without_tracing)

    @property
    def width(self) -> int:
        """The number of plans that are simulated at a time."""
        return self._map.processes

    def knows(self, plan: Plan) -> bool:
        """Whether time and memory of this plan are simulated."""
        return self._refinement(plan).knows(plan)

    def knows_seconds(self, plan: Plan) -> bool:
        """Whether the time of this plan is simulated."""
        return self._refinement(plan).knows_seconds(plan)

    def expect(
        self,
        *,
        compared: Iterable[Plan] = (),
        deepened: Iterable[Plan] = (),
        seconds: Iterable[Plan] = (),
        limit: Bytes | None = None,
    ) -> None:
        """Simulate plans of which `Refinement` will be asked.

        Args:
            compared: those whose time and memory will be asked for.
            deepened: those of which forms with more buckets ahead will be asked for, too, if they
                fit into `limit`.
            seconds: those of which only the time will be asked for.
            limit: bytes per rank.
        """
        if self.width < 2:
            return
        tasks = [_Task(plan, deepens=True, limit=limit) for plan in deepened]
        tasks += [_Task(plan) for plan in compared]
        tasks = [one for one in tasks if not self.knows(one.plan)]
        for plan in seconds:
            if not self.knows_seconds(plan):
                tasks.append(_Task(plan, only_seconds=True))
        for task, found in zip(tasks, self._map(self._simulated, tasks), strict=True):
            refinement = self._refinement(task.plan)
            if isinstance(found, dict):
                refinement.learn(task.plan, found)
            elif found is not None:
                refinement.learn_seconds(task.plan, found)

    def _simulated(self, task: _Task) -> dict[int, Simulated] | Seconds:
        plan, refinement = task.plan, self._refinement(task.plan)
        if task.only_seconds:
            return refinement.seconds(plan)
        found = refinement.compared(plan)
        if task.deepens and (task.limit is None or found.peak_bytes <= task.limit):
            refinement.deepened(found, task.limit)
        return refinement.simulated(plan)

    def _refinement(self, plan: Plan) -> Refinement:
        refinement = self._of(plan)
        return self._known.setdefault(id(refinement), refinement)

    def _without_tracing(self) -> None:
        """In a forked process torch can trace no operator calls."""
        for refinement in self._known.values():
            refinement.without_tracing()
