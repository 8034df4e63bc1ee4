"""A step of a whole batch as tasks, as the runtime issues them to a rank's two streams.

What an operator reads in another layout is brought there right before it, and
the operator waits; so do gradients on their way back. What parameters need is on its way
while operators run, in buckets: sums of their gradients, which are waited for at the end of the
backward pass; copies of sharded ones, prefetched one bucket ahead, and their gradients, of which
one bucket at a time is under way (`program/step/passes`).
Meanwhile the device is slower by the part of their time that the machine does not hide
(`Plan.overlap` of sums, `Plan.gather_overlap` of the rest, which is waited for sooner), and
messages along other axes by the part that links are shared (`Plan.contention`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from shardwright.ir.layout import Seconds
from shardwright.ir.plan import Phase, Plan, PlanError, PlannedOp, PlannedTransfer
from shardwright.ir.redistribution import Collective
from shardwright.ir.timeline import Stream, Task, Timeline, Track
from shardwright.simulate.time.comm_buckets import Sums, flights_of, sums_of
from shardwright.simulate.time.timeline import schedule

_BY_SUMS = "slowed down by sums of gradients"
_BY_COPIES = "slowed down by parameters on their way"
_LOCAL = frozenset(kind.value for kind in Collective if not kind.moves_data)


def timeline(plan: Plan) -> Timeline:
    """When everything of the step runs on a rank of `plan`.

    Of a step in micro-batches that is simulated from its step program (`step_program.py`) and kept
    in the plan; raises `PlanError` for one where it is not.
    """
    if plan.timeline is not None:
        return plan.timeline
    if plan.micro_batches > 1:
        raise PlanError(
            "the plan takes its batch in micro-batches and has no timeline, because its step was"
            " not simulated; `shardwright recost TARGET plan.json` simulates it"
        )
    return schedule(tasks_of(plan))


def settled_seconds(plan: Plan) -> Seconds:
    """The step time of a whole batch with what overlaps; `plan.step_seconds` is the sum of all.

    It is that sum less what is hidden, so that nothing hidden changes no digit.
    """
    if not plan.overlap and not plan.gather_overlap:
        return plan.step_seconds
    tasks = _Tasks(plan)
    if not tasks.hides_any:
        return plan.step_seconds
    hidden = max(0.0, plan.added_seconds - schedule(tasks.of_a_step()).seconds)
    return Seconds(max(0.0, plan.step_seconds - hidden))


def tasks_of(plan: Plan) -> tuple[Task, ...]:
    """All tasks of one step of every rank, of a whole batch: they all run the same program."""
    return tuple(_Tasks(plan).of_a_step())


class RankWait(NamedTuple):
    """Ranks wait for each other: what they computed since the wait before, and why they wait.

    `first` of what they wait for was sent when they had `slack` seconds of computing left.
    """

    computed: Seconds
    first: PlannedTransfer
    slack: Seconds


def waits_of(plan: Plan) -> Iterator[RankWait]:
    """The waits of one step, in their order; the last one comes before all gradients are there."""
    tasks = _Tasks(plan)
    total = last = 0.0
    sent: dict[int, float] = {}  # message under way -> what was computed before it
    for number, task in enumerate((*tasks.of_a_step(), None)):
        if number in tasks.carried:
            sent[number] = total
        elif task is None or (task.track.stream is Stream.COMPUTE and not task.idle):
            over = [n for n in sent if task is None or n in task.after]
            if over:  # what was sent last is there last
                slack = Seconds(total - sent[over[-1]])
                yield RankWait(Seconds(total - last), tasks.carried[over[-1]], slack)
                last = total
            for n in over:
                del sent[n]
            total += task.seconds if task else 0.0


@final
class _Tasks:
    """The tasks of the ranks while they are written."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.tasks: list[Task] = []
        self.carried: dict[
            int, PlannedTransfer
        ] = {}  # of each message between ranks the first part
        ranks = f"each of {plan.devices} ranks"
        self._here = Track(ranks, Stream.COMPUTE)
        axes = plan.mesh.names if plan.contention < 1 else ("",) * len(plan.mesh.names)
        self._links = {
            name: Track(ranks, Stream.COMMUNICATION, axis)
            for name, axis in zip(plan.mesh.names, axes, strict=True)
        }
        soon = plan.overlap if plan.gather_overlap is None else plan.gather_overlap
        self._hidden = {_BY_SUMS: plan.overlap, _BY_COPIES: soon}
        self._last = -1  # number of the last task that computes
        self._waits: list[int] = []  # what the next one waits for
        self._sources = {op.name: op.source.module for op in plan.ops}
        sums = sums_of(plan)
        # By the operator that buckets wait for.
        self._full: defaultdict[int, list[Sums]] = defaultdict(list)
        for bucket in reversed(sums):
            self._full[bucket.at].append(bucket)
        self._last_sum = sums[0] if sums else None
        self._summing: list[int] = []  # buckets under way
        self._flights = flights_of(plan)
        # Numbers of the flights that an operator waits for, by its own, and again by its name.
        self._landing: defaultdict[int, list[int]] = defaultdict(list)
        self._landing_again: defaultdict[str, list[int]] = defaultdict(list)
        for place, flight in enumerate(self._flights):
            self._landing[flight.at].append(place)
            for consumer in dict.fromkeys(t.consumer for t in flight.again):
                self._landing_again[consumer].append(place)
        self._flying: dict[int, int] = {}  # flight under way -> the task that it is
        self._again: set[int] = set()  # flights whose copies were gathered again
        self._scattering: list[int] = []  # the bucket of gradients that is under way
        apart = {id(t) for bucket in sums for t in bucket.sums}
        apart |= {id(t) for f in self._flights for t in (*f.forward, *f.again, *f.backward)}
        known = {op.name for op in plan.ops}
        self._moved: defaultdict[tuple[str, Phase], list[PlannedTransfer]] = defaultdict(list)
        for t in plan.transfers:
            if id(t) not in apart:
                self._moved[t.consumer if t.consumer in known else "", t.phase].append(t)
        self._recomputed: defaultdict[int, list[PlannedOp]] = defaultdict(list)
        for op in plan.ops:
            if op.segment:
                self._recomputed[op.segment].append(op)

    @property
    def hides_any(self) -> bool:
        """Whether anything is on its way while operators run."""
        return bool(self._full or self._flights)

    def of_a_step(self) -> list[Task]:
        """Everything, once."""
        self.forward()
        self.backward()
        for parameter in self.plan.parameters:
            where = parameter.name.rpartition(".")[0]
            self._add(f"update {parameter.name}", "update", parameter.seconds, where)
        return self.tasks

    def forward(self) -> None:
        """The forward pass."""
        for number, op in enumerate(self.plan.ops):
            self._fly(number)
            self._bring(op.name, Phase.FORWARD)
            self._compute(op, "forward", op.forward_seconds)
        self._bring("", Phase.FORWARD)

    def backward(self) -> None:
        """The backward pass."""
        self._bring("", Phase.BACKWARD)
        left = dict(self._recomputed)
        for number, op in reversed(list(enumerate(self.plan.ops))):
            again: Sequence[PlannedOp] = left.pop(op.segment, ())
            for one in again:
                self._bring(one.name, Phase.RECOMPUTE)
                self._compute(one, "again", one.forward_seconds)
            if not op.segment:
                self._fly_again(op.name)
                self._bring(op.name, Phase.RECOMPUTE)
            self._compute(op, "backward", op.backward_seconds)
            self._bring(op.name, Phase.BACKWARD)
            self._sum(number)
            self._scatter(number)
        self._waits += self._scattering

    def _bring(self, consumer: str, phase: Phase) -> None:
        """Redistributions that the next operator waits for."""
        for t in self._moved[consumer, phase]:
            self._communicate([t], t.seconds)

    def _sum(self, number: int) -> None:
        """Send off the buckets that are full now, and after the last one wait for all."""
        for bucket in self._full.get(number, ()):
            name = f"sum gradients of {len(bucket.sums)} parameters"
            self._summing.append(self._send(name, bucket.sums, _BY_SUMS))
            if bucket is self._last_sum:
                self._waits += self._summing

    def _fly(self, number: int) -> None:
        """Send for the copies that are needed next, and wait for those needed now."""
        landing = self._landing.get(number, ())
        for place in landing:
            for one in (place, place + 1):
                if one < len(self._flights) and one not in self._flying:
                    copies = self._flights[one].forward
                    name = f"gather {len(copies)} parameters"
                    self._flying[one] = self._send(name, copies, _BY_COPIES)
        self._waits += [self._flying.pop(place) for place in landing]

    def _fly_again(self, consumer: str) -> None:
        """Wait for copies that an operator wants again, and send for those of the flight before."""
        for place in self._landing_again.get(consumer, ()):
            if place in self._again:
                continue
            self._send_again(place)
            self._again.add(place)
            self._waits.append(self._flying.pop(place))
            self._send_again(place - 1)

    def _send_again(self, place: int) -> None:
        if place < 0 or place in self._flying or place in self._again:
            return
        again = self._flights[place].again
        if not again:
            return
        name = f"gather {len(again)} parameters again"
        self._flying[place] = self._send(name, again, _BY_COPIES)

    def _scatter(self, number: int) -> None:
        """Send off the gradients of a flight, when those sent off before have arrived."""
        for place in self._landing.get(number, ()):
            gradients = self._flights[place].backward
            if gradients:
                self._waits += self._scattering
                name = f"scatter gradients of {len(gradients)} parameters"
                self._scattering = [self._send(name, gradients, _BY_COPIES)]

    def _send(self, name: str, together: Sequence[PlannedTransfer], slowed: str) -> int:
        """Something that is on its way while the device goes on, as slow as it makes it."""
        seconds = sum(t.seconds for t in together)
        before = (*self._waits, self._last) if self._last >= 0 else tuple(self._waits)
        collectives, phase = together[0].collectives, together[0].phase.value
        what = collectives[-1]
        sent = self._message(name, Seconds(seconds), before, phase, what, collectives)
        self.carried[sent] = together[0]
        lost = Seconds(seconds * (1 - self._hidden[slowed]))
        self._add(slowed, phase, lost, what, idle=True)
        return sent

    def _communicate(self, moved: Sequence[PlannedTransfer], seconds: Seconds) -> None:
        """A redistribution that what comes next waits for."""
        after = (*self._waits, self._last) if self._last >= 0 else tuple(self._waits)
        for t in moved:
            collectives = ", ".join(t.collectives)
            name = f"{collectives}: {'gradient of ' * (t.phase is Phase.BACKWARD)}{t.value}"
            where = self._sources.get(t.consumer, "")
            sent = self._message(name, seconds, after, t.phase.value, where, t.collectives)
            if any(one.split(" ")[0] not in _LOCAL for one in t.collectives):
                self.carried[sent] = t
            self._waits.append(sent)

    def _message(
        self,
        name: str,
        seconds: Seconds,
        after: tuple[int, ...],
        kind: str,
        where: str,
        collectives: Sequence[str],
    ) -> int:
        """A message along the axes of its collectives; along others nothing goes for a while."""
        every = dict.fromkeys(self._links.values())
        own = dict.fromkeys(self._links[one.split(" ")[1]] for one in collectives)
        sent = len(self.tasks)
        for number, track in enumerate((*own, *(track for track in every if track not in own))):
            part = Seconds(seconds if track in own else seconds * self.plan.contention)
            if part or not number:
                self.tasks.append(Task(name, track, part, after, kind, where, idle=number > 0))
        return sent

    def _compute(self, op: PlannedOp, kind: str, seconds: Seconds) -> None:
        name = op.target.split(".")[1] if op.target.count(".") else op.target
        where = op.source.module
        self._add(f"{where}: {name}" if where else name, kind, seconds, where)

    def _add(
        self, name: str, kind: str, seconds: Seconds, where: str, *, idle: bool = False
    ) -> None:
        if not seconds:
            return
        self._last = len(self.tasks)
        task = Task(name, self._here, seconds, tuple(self._waits), kind, where, idle)
        self.tasks.append(task)
        self._waits = []
