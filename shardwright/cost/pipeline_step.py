"""The step of a pipeline as tasks: every stage has a track to compute and one to communicate.

A stage takes the passes of its micro-batches in the order of the schedule, each as soon as what it
needs has arrived: a value from the stage before, or its gradient from the one behind. What is done
once a step, sums of gradients and updates, comes at the end. An asynchronous pipeline never empties
between two updates, so several mini-batches of it are shown, each updated after its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from shardwright.cost.pipelines import order_of
from shardwright.cost.timeline import Stream, Task, Timeline, Track, schedule
from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import MULTIPLE, PipelineError
from shardwright.ir.plan import Phase, Plan

_MINI_BATCHES = 3  # of an asynchronous pipeline, for each of its stages


class StageWork(NamedTuple):
    """Seconds of one stage: of one micro-batch's passes, and of what is done once a step."""

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0

    def plus(self, forward: float = 0.0, backward: float = 0.0, once: float = 0.0) -> StageWork:
        return StageWork(self.forward + forward, self.backward + backward, self.once + once)


def pipeline_timeline(plan: Plan) -> Timeline:
    """When every stage of `plan` does what.

    Raises `PipelineError` for schedules in which a group has several stages: their order is
    torch's matter.
    """
    if plan.schedule in MULTIPLE:
        raise PipelineError(
            f"{plan.schedule} gives a group several stages, in an order that torch makes up; a"
            " timeline there is of GPipe, 1F1B and asynchronous pipelines"
        )
    tasks = _Passes(plan).tasks()
    return schedule(tasks)


def mini_batches(plan: Plan) -> int:
    """How many mini-batches the timeline of an asynchronous `plan` shows; 1 of any other."""
    return _MINI_BATCHES * plan.stages if _asynchronous(plan) else 1


def works_of(plan: Plan) -> list[StageWork]:
    """What each stage takes, by the plan's operators, transfers and parameters."""
    number = {op.name: i for i, op in enumerate(plan.ops)}
    cuts = [number[name] for name in plan.cuts]
    stage = [sum(cut <= i for cut in cuts) for i in range(len(plan.ops))]
    works, pieces = [StageWork()] * plan.stages, plan.micro_batches
    home: dict[str, int] = {}  # of a value, the stage that first reads it
    for i, op in enumerate(plan.ops):
        forward = op.forward_seconds / pieces
        works[stage[i]] = works[stage[i]].plus(forward, op.seconds / pieces - forward)
        for value in op.reads:
            home.setdefault(value, stage[i])
    parameters = {parameter.name for parameter in plan.parameters}
    for transfer in plan.transfers:
        at = stage[number.get(transfer.consumer, len(stage) - 1)]
        seconds = transfer.seconds / pieces
        if (
            transfer.value in parameters
            and transfer.phase is Phase.BACKWARD
            and transfer.times == 1
        ):
            works[at] = works[at].plus(once=transfer.seconds)
        elif transfer.phase is Phase.FORWARD:
            works[at] = works[at].plus(forward=seconds)
        else:
            works[at] = works[at].plus(backward=seconds)
    for parameter in plan.parameters:
        at = home.get(parameter.name, 0)
        works[at] = works[at].plus(once=parameter.seconds)
    return works


def _asynchronous(plan: Plan) -> bool:
    return plan.pipeline is not None and plan.pipeline.weights is not None


class _Pass(NamedTuple):
    number: int  # of the micro-batch, or mini-batch
    forward: bool


@final
class _Passes:
    """All passes with the times at which they end, so that tracks get them in their order."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.works = plan, works_of(plan)
        self.continuous = _asynchronous(plan)
        self.count = mini_batches(plan) if self.continuous else plan.micro_batches
        self.ways = plan.ways or (Seconds(0.0),) * (plan.stages - 1)
        width = plan.layout_mesh.size
        groups = [range(s * width, (s + 1) * width) for s in range(plan.stages)]
        self.names = [
            f"stage {s + 1}, rank" + (f" {g[0]}" if width == 1 else f"s {g[0]}-{g[-1]}")
            for s, g in enumerate(groups)
        ]

    def tasks(self) -> list[Task]:
        """In the order in which they start, so that on no track one waits for a later one."""
        plan = self.plan
        orders = [
            [_Pass(*one) for one in order_of(plan.schedule, s, plan.stages, self.count)]
            for s in range(plan.stages)
        ]
        places, made = [0] * plan.stages, list[Task]()
        ends: dict[tuple[int, _Pass], int] = {}  # the task that a pass of a stage is
        last: list[int | None] = [None] * plan.stages
        while any(place < len(order) for place, order in zip(places, orders, strict=True)):
            stage, needed = self._next(orders, places, ends)
            one = orders[stage][places[stage]]
            after = [] if needed is None else [self._brought(made, stage, one, ends[needed])]
            made.append(self._pass(stage, one, after))
            ends[stage, one] = last[stage] = len(made) - 1
            places[stage] += 1
            if self.continuous and not one.forward:
                made += self._once(stage)
        if not self.continuous:
            for stage in range(plan.stages):
                made += self._once(stage)
        return made

    def _next(
        self,
        orders: list[list[_Pass]],
        places: list[int],
        ends: dict[tuple[int, _Pass], int],
    ) -> tuple[int, tuple[int, _Pass] | None]:
        """The stage whose next pass has all that it needs, and the pass that gives it that.

        Stages that are furthest behind go first.
        """
        for stage in sorted(range(len(orders)), key=lambda s: places[s]):
            if places[stage] == len(orders[stage]):
                continue
            needed = self._needed(stage, orders[stage][places[stage]])
            if needed is None or needed in ends:
                return stage, needed
        raise PipelineError(f"the schedule {self.plan.schedule} waits for itself")

    def _needed(self, stage: int, one: _Pass) -> tuple[int, _Pass] | None:
        other = stage - 1 if one.forward else stage + 1
        return (other, one) if 0 <= other < self.plan.stages else None

    def _brought(self, made: list[Task], stage: int, one: _Pass, before: int) -> int:
        """The task that brings a pass what it needs, on the receiving stage's link."""
        cut = stage - 1 if one.forward else stage
        what = "values" if one.forward else "gradients"
        name = f"receive {what} {one.number + 1}"
        track = Track(self.names[stage], Stream.COMMUNICATION)
        kind = Phase.FORWARD.value if one.forward else Phase.BACKWARD.value
        made.append(Task(name, track, self.ways[cut], (before,), kind, self.plan.cuts[cut]))
        return len(made) - 1

    def _pass(self, stage: int, one: _Pass, after: list[int]) -> Task:
        work = self.works[stage]
        kind = Phase.FORWARD.value if one.forward else Phase.BACKWARD.value
        seconds = Seconds(work.forward if one.forward else work.backward)
        track = Track(self.names[stage], Stream.COMPUTE)
        return Task(f"{kind} {one.number + 1}", track, seconds, tuple(after), kind)

    def _once(self, stage: int) -> Iterator[Task]:
        if seconds := self.works[stage].once:
            track = Track(self.names[stage], Stream.COMPUTE)
            yield Task("sum gradients and update", track, Seconds(seconds), (), "update")
