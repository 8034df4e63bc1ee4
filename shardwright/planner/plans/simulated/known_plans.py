"""Keeps what was simulated of plans, so that it is simulated once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import Plan
from shardwright.planner.plans.simulated.memory_refinement import RankPeak


@final
@dataclass(slots=True)
class KnownPlan:
    """A given plan, and its forms with simulated figures; None: not asked for yet.

    Attributes:
        given: the plan, with additive figures or none simulated.
        timed: with the time of its step and the timeline.
        with_memory: with its simulated memory.
        whole: with both, from all layers.
        compared: with both, from few layers where these suffice.
        settled: as it is shown, with notes.
        folds: whether few layers give the time, `few_seconds`, which is None if they do not.
        worst: the rank that needs most memory.
        reserved: what torch's allocator reserves there, by few layers.
        deeper: forms with another number of buckets ahead, by that number; with records of
            their own.
    """

    given: Plan
    timed: Plan | None = None
    with_memory: Plan | None = None
    whole: Plan | None = None
    compared: Plan | None = None
    settled: Plan | None = None
    folds: bool | None = None
    few_seconds: Seconds | None = None
    worst: RankPeak | None = None
    reserved: Bytes | None = None
    deeper: dict[int, Plan] = field(default_factory=dict)

    @property
    def best(self) -> Plan | None:
        """The settled plan, or else the compared one."""
        return self.settled or self.compared


@final
class KnownPlans:
    """The records of plans, by identity: that of a form is that of the plan it was made from."""

    def __init__(self) -> None:
        self._records: dict[int, KnownPlan] = {}  # which keep their plans, so no id is reused

    def __getitem__(self, plan: Plan) -> KnownPlan:
        if id(plan) not in self._records:
            self._records[id(plan)] = KnownPlan(plan)
        return self._records[id(plan)]

    def link(self, form: Plan, record: KnownPlan) -> None:
        """Let a form that the record keeps lead to it, unless it leads to one already."""
        self._records.setdefault(id(form), record)
