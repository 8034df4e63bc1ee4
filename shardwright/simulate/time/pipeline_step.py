"""The step of a pipeline as tasks on a compute and a communication stream per group.

A group makes the passes of its stages in the order of the schedule, each as soon as what it
needs has arrived: a value from the stage before, or its gradient from the one behind. What is done
once a step, sums of gradients and updates, comes at the end. An asynchronous pipeline never empties
between two updates, so several mini-batches of it are shown, each updated after its backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Phase, Plan
from shardwright.ir.schedules.registry import orders
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError
from shardwright.ir.timeline import Stream, Task, Timeline, Track
from shardwright.simulate.time.timeline import schedule

_NAMES = {
    Kind.FORWARD: Phase.FORWARD.value,
    Kind.BACKWARD: Phase.BACKWARD.value,
    Kind.INPUTS: "backward to inputs",
    Kind.WEIGHTS: "backward to weights",
}
_MINI_BATCHES = 3  # of an asynchronous pipeline, for each of its stages


class StageWork(NamedTuple):
    """Seconds of one stage: of one micro-batch's passes, and of what is done once a step.

    A stage that `splits` makes its backward pass in halves where the schedule has it.
    """

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    splits: bool = False

    def plus(self, forward: float = 0.0, backward: float = 0.0, once: float = 0.0) -> StageWork:
        return StageWork(
            self.forward + forward, self.backward + backward, self.once + once, self.splits
        )

    def of(self, kind: Kind) -> float:
        """Seconds of one pass; both halves of a backward pass take as long."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUTS: self.backward / 2 if self.splits else self.backward,
            Kind.WEIGHTS: self.backward / 2 if self.splits else 0.0,
        }[kind]


def pipeline_timeline(plan: Plan) -> Timeline:
    """The timeline of all stages of `plan`."""
    return schedule(_Passes(plan).tasks())


def mini_batches(plan: Plan) -> int:
    """The number of mini-batches in the timeline of an asynchronous `plan`; 1 of any other."""
    return _MINI_BATCHES * plan.stages if _asynchronous(plan) else 1


def works_of(plan: Plan) -> list[StageWork]:
    """Seconds of each stage, from the plan's operators, transfers and parameters."""
    number = {op.name: i for i, op in enumerate(plan.ops)}
    cuts = [number[name] for name in plan.cuts]
    stage = [sum(cut <= i for cut in cuts) for i in range(len(plan.ops))]
    works = [StageWork(splits=splits) for splits in _splits(plan, stage)]
    micro_batches = plan.micro_batches
    home: dict[str, int] = {}  # of a value, the stage that first reads it
    for i, op in enumerate(plan.ops):
        forward = op.forward_seconds / micro_batches
        works[stage[i]] = works[stage[i]].plus(forward, op.seconds / micro_batches - forward)
        for value in op.reads:
            home.setdefault(value, stage[i])
    parameters = {parameter.name for parameter in plan.parameters}
    for transfer in plan.transfers:
        at = stage[number.get(transfer.consumer, len(stage) - 1)]
        seconds = transfer.seconds / micro_batches
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


def _splits(plan: Plan, stage: list[int]) -> list[bool]:
    """Of which stages gradients of inputs and of weights can be computed apart.

    As `lower.stages.splits_backward` has it; all parameters are taken to be trained.
    """
    weights = {parameter.name for parameter in plan.parameters}
    found = [True] * plan.stages
    home: dict[str, int] = {}  # of operators that a gradient goes through, their stage
    fed: set[str] = set()  # those of them that depend on the stage before
    read: set[tuple[int, str]] = set()
    for at, op in zip(stage, plan.ops, strict=True):
        mine = weights.intersection(op.reads)
        from_before = any(home.get(name, at) < at or name in fed for name in op.reads)
        if mine or any(name in home for name in op.reads):
            home[op.name] = at
            if from_before:
                fed.add(op.name)
            else:
                found[at] = False
        if any((at, name) in read for name in mine):
            found[at] = False
        read.update((at, name) for name in mine)
    return found


def _asynchronous(plan: Plan) -> bool:
    return plan.pipeline is not None and plan.pipeline.weights is not None


@final
class _Passes:
    """All passes with the times at which they end, so that tracks get them in their order."""

    def __init__(self, plan: Plan) -> None:
        assert plan.pipeline is not None, "this plan has no pipeline"
        self.plan, self.works = plan, works_of(plan)
        self.continuous = _asynchronous(plan)
        self.count = mini_batches(plan) if self.continuous else plan.micro_batches
        self.ways = plan.receive_seconds or (Seconds(0.0),) * (plan.stages - 1)
        self.homes, self.groups = plan.pipeline.homes, plan.pipeline.groups
        width = plan.layout_mesh.size
        self.names = []
        for group in range(self.groups):
            mine = [str(s + 1) for s, home in enumerate(self.homes) if home == group]
            stages = f"stage{'s' if mine[1:] else ''} {', '.join(mine)}"
            first = group * width
            ranks = f"rank {first}" if width == 1 else f"ranks {first}-{first + width - 1}"
            self.names.append(f"{stages}, {ranks}")

    def tasks(self) -> list[Task]:
        """In the order in which they start, so that on no track one waits for a later one."""
        every = orders(self.plan.schedule, self.groups, self.plan.stages, self.count)
        places, made = [0] * self.groups, list[Task]()
        ends: dict[Pass, int] = {}  # the task that a pass is
        while any(place < len(mine) for place, mine in zip(places, every, strict=True)):
            group, needed = self._next(every, places, ends)
            one = every[group][places[group]]
            after = [] if needed is None else [self._received(made, one, needed, ends[needed])]
            made.append(self._pass(one, after))
            ends[one] = len(made) - 1
            places[group] += 1
            if self.continuous and one.kind is Kind.BACKWARD:
                made += self._once(one.stage)
        if not self.continuous:
            for stage in range(self.plan.stages):
                made += self._once(stage)
        return made

    def _next(
        self, every: tuple[tuple[Pass, ...], ...], places: list[int], ends: dict[Pass, int]
    ) -> tuple[int, Pass | None]:
        """The group whose next pass has all that it needs, and the pass that gives it that.

        Groups that are furthest behind go first.
        """
        for group in sorted(range(self.groups), key=lambda g: places[g]):
            if places[group] == len(every[group]):
                continue
            needed = self._needed(every[group][places[group]])
            if needed is None or needed in ends:
                return group, needed
        raise PipelineError(f"the schedule {self.plan.schedule} waits for itself")

    def _needed(self, one: Pass) -> Pass | None:
        other = one.stage - 1 if one.kind is Kind.FORWARD else one.stage + 1
        if one.kind is Kind.WEIGHTS or not 0 <= other < self.plan.stages:
            return None
        return one._replace(stage=other)

    def _received(self, made: list[Task], one: Pass, needed: Pass, before: int) -> int:
        """The task that brings a pass what it needs, on the receiving group's link."""
        home = self.homes[one.stage]
        if self.homes[needed.stage] == home:
            return before
        cut = min(one.stage, needed.stage)
        forward = one.kind is Kind.FORWARD
        name = f"receive {'values' if forward else 'gradients'} {one.number + 1}"
        track = Track(self.names[home], Stream.COMMUNICATION)
        kind = Phase.FORWARD.value if forward else Phase.BACKWARD.value
        made.append(Task(name, track, self.ways[cut], (before,), kind, self.plan.cuts[cut]))
        return len(made) - 1

    def _pass(self, one: Pass, after: list[int]) -> Task:
        home = self.homes[one.stage]
        shared = f", stage {one.stage + 1}" if self.homes.count(home) > 1 else ""
        kind = Phase.FORWARD.value if one.kind is Kind.FORWARD else Phase.BACKWARD.value
        seconds = Seconds(self.works[one.stage].of(one.kind))
        track = Track(self.names[home], Stream.COMPUTE)
        name = f"{_NAMES[one.kind]} {one.number + 1}{shared}"
        return Task(name, track, seconds, tuple(after), kind)

    def _once(self, stage: int) -> Iterator[Task]:
        if seconds := self.works[stage].once:
            track = Track(self.names[self.homes[stage]], Stream.COMPUTE)
            yield Task("sum gradients and update", track, Seconds(seconds), (), "update")
