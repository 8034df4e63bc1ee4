"""A planned step as tasks, in the order in which the runtime gives them to a rank's two streams.

What an operator reads in another layout is brought there right before it, and
the operator waits; so do gradients on their way back, and gathers of sharded
parameters. Only sums of gradients are on their way while the backward pass goes
on: in buckets, of which each is waited for one bucket later
(`lower/buckets.py`). While they are, the device is slower by the part of their
time that the machine does not hide (`Plan.overlap`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from shardwright.cost.timeline import Stream, Task, Timeline, Track, schedule
from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Phase, Plan, PlannedOp, Transfer
from shardwright.ir.redistribution import BUCKET_BYTES, Collective

_SUM = Collective.ALL_REDUCE.value


def timeline(plan: Plan) -> Timeline:
    """When everything of the step runs on a rank of `plan`."""
    return schedule(tasks_of(plan))


def settled_seconds(plan: Plan) -> Seconds:
    """The step time with what overlaps; `plan.step_seconds` is the sum of all parts.

    It is that sum less what is hidden, so that nothing hidden changes no digit.
    """
    if plan.overlap == 0 or not any(in_buckets(plan)):
        return plan.step_seconds
    parts = [op.seconds for op in plan.ops]
    parts += [transfer.seconds for transfer in plan.transfers]
    parts += [parameter.seconds for parameter in plan.parameters]
    hidden = max(0.0, sum(parts) - timeline(plan).seconds)
    return Seconds(max(0.0, plan.step_seconds - hidden))


def in_buckets(plan: Plan) -> list[bool]:
    """For each transfer, whether it sums a gradient while the backward pass goes on.

    So it is where the one reader of a parameter takes it as it is stored.
    """
    parameters = {parameter.name for parameter in plan.parameters}
    brought = {t.value for t in plan.transfers if t.phase is not Phase.BACKWARD}
    back: defaultdict[str, int] = defaultdict(int)
    for t in plan.transfers:
        back[t.value] += t.phase is Phase.BACKWARD
    return [
        plan.micro_batches == 1
        and t.phase is Phase.BACKWARD
        and t.value in parameters - brought
        and back[t.value] == 1
        and all(collective.split(" ")[0] == _SUM for collective in t.collectives)
        for t in plan.transfers
    ]


def tasks_of(plan: Plan) -> tuple[Task, ...]:
    """All tasks of one step of every rank: they all run the same program."""
    writer = _Writer(plan, f"each of {plan.devices} ranks")
    for _ in range(plan.micro_batches):
        writer.forward()
        writer.backward()
    writer.finish()
    return tuple(writer.tasks)


@dataclass
class _Bucket:
    """Sums of gradients that are made together, when operator number `at` has gone backward."""

    at: int
    sums: list[Transfer] = field(default_factory=list)
    bytes: int = 0
    task: int = -1


@final
class _Writer:
    """The tasks of one group of ranks while they are written."""

    def __init__(self, plan: Plan, ranks: str) -> None:
        self.plan = plan
        self.tasks: list[Task] = []
        self._here = Track(ranks, Stream.COMPUTE)
        self._link = Track(ranks, Stream.COMMUNICATION)
        self._last = -1  # number of the last task that computes
        self._waits: list[int] = []  # what the next one waits for
        self._sources = {op.name: op.source.module for op in plan.ops}
        self._moved: defaultdict[tuple[str, Phase], list[Transfer]] = defaultdict(list)
        self._buckets: list[_Bucket] = []
        known = {op.name: number for number, op in enumerate(plan.ops)}
        open_: dict[tuple[str, ...], _Bucket] = {}
        for t, summed in zip(plan.transfers, in_buckets(plan), strict=True):
            if not summed:
                consumer = t.consumer if t.consumer in known else ""
                self._moved[consumer, t.phase].append(t)
                continue
            if t.collectives not in open_:
                open_[t.collectives] = _Bucket(known[t.consumer])
                self._buckets.append(open_[t.collectives])
            bucket = open_[t.collectives]
            bucket.sums.append(t)
            bucket.bytes += t.bytes
            if bucket.bytes >= BUCKET_BYTES:
                del open_[t.collectives]
        self._recomputed: defaultdict[int, list[PlannedOp]] = defaultdict(list)
        for op in plan.ops:
            if op.piece:
                self._recomputed[op.piece].append(op)

    def forward(self) -> None:
        """The forward pass of one micro-batch."""
        for op in self.plan.ops:
            self._bring(op.name, Phase.FORWARD)
            self._compute(op, "forward", op.forward_seconds)
        self._bring("", Phase.FORWARD)

    def backward(self) -> None:
        """The backward pass of one micro-batch."""
        self._bring("", Phase.BACKWARD)
        left = dict(self._recomputed)
        for number, op in reversed(list(enumerate(self.plan.ops))):
            again: Sequence[PlannedOp] = left.pop(op.piece, ())
            for one in again:
                self._bring(one.name, Phase.AGAIN)
                self._compute(one, "again", one.forward_seconds)
            if not op.piece:
                self._bring(op.name, Phase.AGAIN)
            self._compute(op, "backward", op.backward_seconds)
            self._bring(op.name, Phase.BACKWARD)
            self._sum(number)

    def finish(self) -> None:
        """What is done once, when all micro-batches are through."""
        for t in self.plan.transfers:
            if t.times == 1 and self.plan.micro_batches > 1:
                self._communicate([t], t.seconds)
        for parameter in self.plan.parameters:
            where = parameter.name.rpartition(".")[0]
            self._add(f"update {parameter.name}", "update", parameter.seconds, where)

    def _bring(self, consumer: str, phase: Phase) -> None:
        """Redistributions that the next operator waits for."""
        for t in self._moved[consumer, phase]:
            if t.times == self.plan.micro_batches:
                self._communicate([t], Seconds(t.seconds / t.times))

    def _sum(self, number: int) -> None:
        """Send off the buckets that are full now, and wait for those sent off before."""
        for place, bucket in enumerate(self._buckets):
            if bucket.at != number:
                continue
            seconds = sum(t.seconds for t in bucket.sums)
            before = (*self._waits, self._last) if self._last >= 0 else tuple(self._waits)
            name = f"sum gradients of {len(bucket.sums)} parameters"
            bucket.task = len(self.tasks)
            what = bucket.sums[0].collectives[-1]
            self.tasks.append(Task(name, self._link, Seconds(seconds), before, "backward", what))
            slowed = Seconds(seconds * (1 - self.plan.overlap))
            self._add("slowed down by sums of gradients", "backward", slowed, what, idle=True)
            later = self._buckets[place + 1 : place + 2]
            self._waits += [one.task for one in later if one.task >= 0]
            if place == 0:
                self._waits.append(bucket.task)

    def _communicate(self, moved: Sequence[Transfer], seconds: Seconds) -> None:
        """A redistribution that what comes next waits for."""
        after = (*self._waits, self._last) if self._last >= 0 else tuple(self._waits)
        for t in moved:
            collectives = ", ".join(t.collectives)
            name = f"{collectives}: {'gradient of ' * (t.phase is Phase.BACKWARD)}{t.value}"
            where = self._sources.get(t.consumer, "")
            self._waits.append(len(self.tasks))
            self.tasks.append(Task(name, self._link, seconds, after, t.phase.value, where))

    def _compute(self, op: PlannedOp, kind: str, seconds: Seconds) -> None:
        part = Seconds(seconds / self.plan.micro_batches)
        name = op.target.split(".")[1] if op.target.count(".") else op.target
        where = op.source.module
        self._add(f"{where}: {name}" if where else name, kind, part, where)

    def _add(
        self, name: str, kind: str, seconds: Seconds, where: str, *, idle: bool = False
    ) -> None:
        if not seconds:
            return
        self._last = len(self.tasks)
        task = Task(name, self._here, seconds, tuple(self._waits), kind, where, idle)
        self.tasks.append(task)
        self._waits = []
