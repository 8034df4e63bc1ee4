"""Candidates, which are points that may become plans, and tests whether one improves on others."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.memory import Memory
from shardwright.ir.options.constraints import Constraint
from shardwright.ir.pipeline import groups_of
from shardwright.ir.plan import Plan
from shardwright.ir.schedules.registry import schedule_named
from shardwright.planner.pipeline.stage_assignment import Staged
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.tables.memory import fixed_bytes
from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier.sweep import DualBound


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A point on one mesh, with the data from which its plan is built."""

    point: Point
    peak: Bytes
    writer: PlanBuilder
    name: str
    notes: tuple[str, ...]
    broken: tuple[Constraint, ...] = ()
    staged: Staged | None = None
    memory: Callable[[], Memory] | None = None  # of pipelines
    again: bool = False  # whether a second search found it (`bottlenecks.py`)

    @property
    def cost(self) -> tuple[Seconds, Bytes]:
        return Seconds(self.point.time), self.peak

    @property
    def kind(self) -> Hashable:
        """Candidates of one kind take as much longer than by the tables, in any form of a graph."""
        model = self.writer.space.model
        return model.mesh.shape, model.micro_batches, self.writer.optimizer, self.again

    @property
    def least(self) -> int:
        """A lower bound of its bytes: state and batch; of a pipeline, their mean over groups."""
        lasting = self.writer.lasting_bytes(self.point.choice)
        if self.staged is None:
            return lasting
        if schedule_named(self.staged.schedule).asynchronous:  # which is not simulated
            return self.peak
        fixed = fixed_bytes(self.writer.graph)
        return fixed + (lasting - fixed) // groups_of(self.staged.mesh)

    def may_fit(self, limit: float) -> bool:
        """Whether its plan may need at most `limit` bytes once it is simulated."""
        return self.peak <= limit or self.least <= limit

    def seconds_within(self, memory: float) -> float:
        """Its seconds; infinite for less `memory` than it needs."""
        return self.point.time if self.peak <= memory else math.inf

    def plan(self, bound: float, notes: tuple[str, ...]) -> Plan:
        """The plan, with `bound` seconds as lower bound of all plans within its memory."""
        staged, notes = self.staged is not None, (*self.notes, *notes)
        found = self.writer.plan(self.point, self.peak, bound, self.name, notes, staged=staged)
        if self.staged is None:
            return found
        names = tuple(self.writer.graph.ops[cut].name for cut in self.staged.cuts)
        seconds = Seconds(self.point.time)  # of the pipeline, without overlap
        asynchronous = schedule_named(self.staged.schedule).asynchronous  # no memory of its program
        return replace(
            found,
            step_seconds=seconds,
            lower_bound_seconds=Seconds(min(bound, seconds)),
            overlap=0.0,
            gather_overlap=None,
            mesh=self.staged.mesh,
            stages=len(names) + 1,
            schedule=self.staged.schedule,
            receive_seconds=self.staged.receive_seconds,
            cuts=names,
            memory=self.memory() if self.memory is not None and asynchronous else None,
        )


def may_improve(
    costs: Sequence[tuple[Seconds, Bytes]], overhead: int
) -> Callable[[DualBound], bool]:
    """A test whether a lower bound permits a plan that improves on the known `costs`.

    If a mesh cannot improve on them anywhere, only the ends of its frontier are searched.
    """
    corners: list[tuple[float, float]] = []
    limit = math.inf
    for seconds, peak in sorted(costs):
        if peak < limit:
            corners.append((seconds, limit - 1 - overhead))
            limit = peak
    corners.append((math.inf, limit - 1 - overhead))
    return lambda bound: any(bound.at(memory) < seconds for seconds, memory in corners)


def may_beat(costs: Sequence[tuple[Seconds, Bytes]], bound: Callable[[float], float]) -> bool:
    """Whether the lower bound `bound` allows a plan that improves on `costs`."""
    limit = math.inf
    for seconds, peak in sorted(costs):
        if peak < limit:
            if bound(limit - 1) < seconds:
                return True
            limit = peak
    return bound(limit - 1) < math.inf


def is_new(
    cost: tuple[Seconds, Bytes], known: Sequence[tuple[Seconds, Bytes]], resolution: float = 0.0
) -> bool:
    """Whether no known cost is at most `cost`, up to the relative `resolution`."""
    time, memory = cost[0] * (1 + resolution), cost[1] * (1 + resolution)
    return not any(seconds <= time and peak <= memory for seconds, peak in known)
