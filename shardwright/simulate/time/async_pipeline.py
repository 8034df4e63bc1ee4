"""Simulates the steps of an asynchronous pipeline as tasks on two streams of each group.

There is no step program: a group runs the passes of its stage in the order of the schedule, each as
soon as its input has arrived, which is a value from the previous stage or a gradient from the next
one. The pipeline is not flushed between updates, so the timeline has several mini-batches. A stage
updates its weights after each backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Phase, Plan
from shardwright.ir.schedules.registry import orders
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError
from shardwright.ir.timeline import Stream, Task, Timeline, Track
from shardwright.simulate.time.stages import group_names
from shardwright.simulate.time.timeline import schedule

_MINI_BATCHES = 3  # of a timeline, for each stage


class StageWork(NamedTuple):
    """Seconds of one stage for a mini-batch: its two passes, and its update."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    def plus(self, forward: float = 0.0, backward: float = 0.0, update: float = 0.0) -> StageWork:
        return StageWork(self.forward + forward, self.backward + backward, self.update + update)

    def of(self, kind: Kind) -> Seconds:
        """Seconds of one pass of this kind."""
        return Seconds(self.forward if kind is Kind.FORWARD else self.backward)


def async_timeline(plan: Plan) -> Timeline:
    """The timeline of all groups of an asynchronous `plan`."""
    return schedule(_Passes(plan).tasks())


def mini_batches(plan: Plan) -> int:
    """The number of mini-batches in the timeline of `plan`; 1 unless it is asynchronous."""
    return _MINI_BATCHES * plan.stages if plan.is_asynchronous else 1


def works_of(plan: Plan) -> list[StageWork]:
    """Seconds of each stage, from the plan's operators, transfers and parameters."""
    number = {op.name: i for i, op in enumerate(plan.ops)}
    cuts = [number[name] for name in plan.cuts]
    stage = [sum(cut <= i for cut in cuts) for i in range(len(plan.ops))]
    works = [StageWork() for _ in range(plan.stages)]
    home: dict[str, int] = {}  # of a value, the stage that first reads it
    for i, op in enumerate(plan.ops):
        works[stage[i]] = works[stage[i]].plus(op.forward_seconds, op.backward_seconds)
        for value in op.reads:
            home.setdefault(value, stage[i])
    for transfer in plan.transfers:
        at = stage[number.get(transfer.consumer, len(stage) - 1)]
        if transfer.phase is Phase.FORWARD:
            works[at] = works[at].plus(forward=transfer.seconds)
        else:
            works[at] = works[at].plus(backward=transfer.seconds)
    for parameter in plan.parameters:
        at = home.get(parameter.name, 0)
        works[at] = works[at].plus(update=parameter.seconds)
    return works


@final
class _Passes:
    """Turns the passes of a plan's schedule into tasks."""

    def __init__(self, plan: Plan) -> None:
        assert plan.pipeline is not None, "this plan has no pipeline"
        self.plan, self.works = plan, works_of(plan)
        self.ways = plan.receive_seconds or (Seconds(0.0),) * (plan.stages - 1)
        self.groups = plan.pipeline.groups
        self.names = group_names(plan.pipeline.homes, plan.layout_mesh.size)

    def tasks(self) -> list[Task]:
        """All tasks, each after those that it depends on."""
        every = orders(self.plan.schedule, self.groups, self.plan.stages, mini_batches(self.plan))
        positions, made = [0] * self.groups, list[Task]()
        ends: dict[Pass, int] = {}  # the task that a pass is
        while any(position < len(mine) for position, mine in zip(positions, every, strict=True)):
            stage, needed = self._next(every, positions, ends)
            one = every[stage][positions[stage]]
            after = [] if needed is None else [self._received(made, one, needed, ends[needed])]
            made.append(self._pass(one, after))
            ends[one] = len(made) - 1
            positions[stage] += 1
            if one.kind is Kind.BACKWARD:
                made += self._update(one.stage)
        return made

    def _next(
        self, every: tuple[tuple[Pass, ...], ...], positions: list[int], ends: dict[Pass, int]
    ) -> tuple[int, Pass | None]:
        """A group whose next pass has its input, and the pass that makes it, if any.

        Groups that have run the fewest passes come first. Raises `PipelineError` if there is none.
        """
        for group in sorted(range(self.groups), key=lambda g: positions[g]):
            if positions[group] == len(every[group]):
                continue
            needed = self._needed(every[group][positions[group]])
            if needed is None or needed in ends:
                return group, needed
        raise PipelineError(f"the schedule {self.plan.schedule} waits for itself")

    def _needed(self, one: Pass) -> Pass | None:
        other = one.stage - 1 if one.kind is Kind.FORWARD else one.stage + 1
        return one._replace(stage=other) if 0 <= other < self.plan.stages else None

    def _received(self, made: list[Task], one: Pass, needed: Pass, before: int) -> int:
        """Add the task that transfers a pass its input, on the receiving group's link."""
        cut = min(one.stage, needed.stage)
        forward = one.kind is Kind.FORWARD
        name = f"receive {'values' if forward else 'gradients'} {one.number + 1}"
        track = Track(self.names[one.stage], Stream.COMMUNICATION)
        kind = Phase.FORWARD.value if forward else Phase.BACKWARD.value
        made.append(Task(name, track, self.ways[cut], (before,), kind, self.plan.cuts[cut]))
        return len(made) - 1

    def _pass(self, one: Pass, after: list[int]) -> Task:
        phase = Phase.FORWARD if one.kind is Kind.FORWARD else Phase.BACKWARD
        track = Track(self.names[one.stage], Stream.COMPUTE)
        name = f"{phase.value} {one.number + 1}"
        seconds = self.works[one.stage].of(one.kind)
        return Task(name, track, seconds, tuple(after), phase.value)

    def _update(self, stage: int) -> Iterator[Task]:
        if seconds := self.works[stage].update:
            track = Track(self.names[stage], Stream.COMPUTE)
            yield Task("update", track, Seconds(seconds), (), "update")
