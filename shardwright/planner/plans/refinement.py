"""Refines time and memory of the plans that are shown, each once."""

from __future__ import annotations

from typing import final

from shardwright.ir.plan import Plan
from shardwright.planner.plans.memory_refinement import MemoryRefinement
from shardwright.planner.plans.time_refinement import TimeRefinement


@final
class Refinement:
    """Settles plans: their memory, and the time of steps in micro-batches."""

    def __init__(self, times: TimeRefinement, memories: MemoryRefinement) -> None:
        self._times, self._memories = times, memories
        self._known: dict[int, tuple[Plan, Plan]] = {}  # by identity, which the first keeps alive

    def settled(self, plan: Plan) -> Plan:
        """`plan` as it is shown."""
        if id(plan) not in self._known:
            self._known[id(plan)] = plan, self._memories.settled(self._times.refined(plan))
        return self._known[id(plan)][1]
