"""Simulates a step program on streams and links: the start and duration of every instruction.

A rank has one compute stream, and each channel has a communicator that runs its transfers in the
order in which they are started. Channels whose transfers fully share their links are one link, in
order, and so are two channels along one axis: gathers on a channel of their own are no faster here.
Others delay each other by a fraction of their time (`StepPrices.contention`). A transfer starts
when all earlier computation has ended. Operators run until it is waited for; they are delayed by
the fraction of its time that the machine does not hide (`StepPrices.hidden`, `in_flight.py`). The
region after its `Wait` starts when the transfer has ended.

Ranks wait for the slowest rank (`StepPrices.late`): a transfer takes longer by the straggler time
at its wait, which is reduced by computation since its start. For that the program is played twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import HOST_UPDATE, STATE_COPIES, UPDATE, Stream, Task, Timeline, Track
from shardwright.program.step.channels import axis_of
from shardwright.program.step.folding.unrolled import Item, Loop, Played, in_order
from shardwright.program.step.host_copies import HOST_CHANNELS, HostCopy
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Free,
    Recv,
    Send,
    Transfer,
    Update,
    Wait,
)
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.costs.update import UpdatePrices
from shardwright.simulate.time.in_flight import Delays, Sent
from shardwright.simulate.time.steady_state import played
from shardwright.simulate.time.timeline import TaskSchedule

# Seconds of computation since ranks last waited for each other, and of these those since the start
# of the collective -> mean wait for the slowest rank, and seconds of computation after which ranks
# would have the remaining skew.
Late = Callable[[float, float], tuple[float, float]]

_TIMED = Forward, Backward, Transfer, HostCopy, Send, Recv, Wait, Update  # the others take no time
END = Played(Free(()))  # follows the last instruction

_NAMES = {
    Purpose.COPY: "gather {} parameters",
    Purpose.GRADIENT: "reduce gradients of {} parameters",
    Purpose.RESULT: "sum {} results",
}


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of an operator of the graph, of one run in one micro-batch.

    `inner` and `inner_backward` are collectives within its forward and backward pass, as (channel,
    seconds); `module` is its module path.
    """

    forward: float
    backward: float
    module: str = ""
    inner: tuple[tuple[str, float], ...] = ()
    inner_backward: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class TransferSeconds:
    """Seconds of a transfer on its link, and of the device to fill and to empty its buffer."""

    link: float
    fill: float = 0.0
    empty: float = 0.0


@dataclass(frozen=True)
class StepPrices:
    """Seconds of everything that a step program does.

    * `ops`: by the name of the operator; others take no time by themselves, such as casts of
      parameters, which are a part of their `update`;
    * `transfer`: seconds of one transfer;
    * `hidden`: the fraction of a transfer's time, by its purpose, that does not delay operators
      beside it;
    * `links`: the name of the link of each axis; channels of one link never run at once;
    * `contention`: the fraction of a transfer's time by which it delays transfers of another link;
    * `message`: seconds of a message between pipeline groups, after both have started it;
    * `late`: the straggler time at a wait (`stragglers.at_a_wait`); None: 0;
    * `update`: seconds of the optimizer's update;
    * `host_copy`: seconds of a copy to the host or from it, which runs beside operators with
      `host_streams` and is otherwise one of them, as on CPUs.
    """

    ops: Mapping[str, OpSeconds]
    transfer: Callable[[Transfer], TransferSeconds]
    hidden: Callable[[Transfer, Purpose], float]
    links: Mapping[str, str]
    contention: Callable[[str, str], float] = lambda _one, _other: 0.0
    message: Callable[[Recv], float] = lambda _one: 0.0
    late: Late | None = None
    update: UpdatePrices = field(default_factory=UpdatePrices)
    host_copy: Callable[[HostCopy], float] = lambda _one: 0.0
    host_streams: bool = True


class Run(NamedTuple):
    """A run of a region: seconds of its operators, and of collectives within them.

    A collective is (name, channel, seconds).
    """

    title: str
    module: str
    forward: float
    backward: float
    inner: list[tuple[str, str, float]]
    inner_backward: list[tuple[str, str, float]]


def simulated(
    program: StepProgram, prices: StepPrices, ranks: int, micro_batches: int = 1
) -> Timeline:
    """The timeline of a step of `program`, which is equal on each of `ranks`.

    Args:
        program: a step program.
        prices: seconds of its instructions.
        ranks: the number of ranks, for the name of the tracks.
        micro_batches: micro-batches of the step; those of the program are repeated if they are
            fewer (`steady_state.played`).

    Raises:
        SteadyStateError: the program's micro-batches cannot be repeated.
    """
    order, kinds = played(in_order(program), lowered(program), micro_batches), purposes(program)
    given = kinds, prices, f"each of {ranks} ranks"
    first = Player(*given, TaskSchedule(), {})
    first.play(order)
    lost = {} if prices.late is None else first.lost(prices.late)
    if not lost:
        return first.made.timeline
    last = Player(*given, TaskSchedule(), lost)
    last.play(order)
    return last.made.timeline


def lowered(program: StepProgram) -> int:
    """The number of micro-batches that a program has."""
    return max((number for _, number, _ in program.inputs), default=0) + 1


class Player:
    """Plays the instructions of a group of ranks and schedules tasks on their streams.

    `kinds` are the purposes of transfers by handle. Tasks are added to `made`. Collectives are
    numbered in the order in which they are started; `lost` are seconds by which a collective takes
    longer because ranks wait for the slowest, by number.
    """

    def __init__(
        self,
        kinds: Mapping[str, Purpose],
        prices: StepPrices,
        ranks: str,
        made: TaskSchedule,
        lost: Mapping[int, float],
    ) -> None:
        self.prices, self._kinds, self._lost = prices, kinds, lost
        self.made, self.ranks = made, ranks
        self._here = Track(ranks, Stream.COMPUTE)
        names = dict.fromkeys(prices.links.values())
        self._tracks = {name: Track(ranks, Stream.COMMUNICATION, name) for name in names}
        self._copies = {name: Track(ranks, Stream.COMMUNICATION, name) for name in HOST_CHANNELS}
        self._runs: dict[str, Run] = {}  # by call
        self._priced_runs: dict[tuple[str, ...], Run] = {}  # by operators
        self._contention: dict[tuple[str, str], float] = {}
        # By the identity of the transfer, as `_price_of` gives it.
        self._priced: dict[int, tuple[str, TransferSeconds, float]] = {}
        self._sent: dict[Hashable, Sent] = {}  # by the name of the transfer
        self._delays = Delays(made.ends)
        self._waits: list[int] = []  # tasks that the next computation waits for
        self._waited_for = 0.0  # seconds of these in which no other transfer has progressed
        self._last = -1  # the last task on the compute stream
        self._phase = "forward"
        self._count = 0  # collectives so far
        self._computed = 0.0  # seconds of computation so far
        self._before: list[float] = []  # by collective, seconds computed before it
        self._awaited: list[int] = []  # collectives that the next computation waits for
        self._orderings: list[tuple[float, int]] = []  # seconds computed before a wait, collective
        self._updated = 0.0  # seconds of the update

    def play(self, order: Sequence[Item]) -> None:
        """Play all instructions."""
        self._items(order, END)
        self._order()

    def _items(self, order: Sequence[Item], end: Item) -> None:
        """Play some instructions, which `end` follows."""
        for now, following in pairwise([*timed(order), end]):
            if isinstance(now, Loop):
                self._repeat(now, following)
            else:
                self._play(now, first_of(following))

    def _repeat(self, loop: Loop, following: Item) -> None:
        """Play all iterations of a loop."""
        for number in range(loop.times):
            self._iterate(loop, number, following)

    def _iterate(self, loop: Loop, number: int, following: Item) -> None:
        """Play an iteration of a loop."""
        if number:
            self._rename(loop.renames)
        self._items(loop.iteration(number), self._behind_iteration(loop, number, following))

    def _rename(self, names: Mapping[Hashable, Hashable]) -> None:
        """Give transfers in flight other names."""
        self._sent.update([(other, self._sent.pop(name)) for name, other in names.items()])

    def _behind_iteration(self, loop: Loop, number: int, following: Item) -> Played:
        """The first instruction behind an iteration; transfers have the names they have there."""
        if number == loop.times - 1:
            return first_of(following)
        end = first_of(timed(loop.iteration(number + 1))[0])
        before = {other: name for name, other in loop.renames.items()}
        return end._replace(transfer=before.get(end.transfer, end.transfer))

    def lost(self, late: Late) -> dict[int, float]:
        """Seconds that ranks wait for the slowest one in each collective, by its number.

        `play` comes before.
        """
        found: dict[int, float] = {}
        since, last = self._updated, 0.0  # of the previous step, after its last wait
        for computed, number in self._orderings:
            lost, since = late(since + computed - last, computed - self._before[number])
            last = computed
            if lost:
                found[number] = lost
        return found

    def _play(self, now: Played, following: Played) -> None:
        match now.instruction:
            case Forward() as one:
                self._phase = "again" if one.again else "forward"
                run = self._runs[one.call] = self._run_of(one)
                for name, channel, seconds in run.inner:
                    self._wait_for(self._send(name, channel, seconds))
                self._compute(run.title, run.forward, run.module)
            case Backward() as one:
                self._phase = "backward"
                run = self._runs[one.call]
                for name, channel, seconds in run.inner_backward:
                    self._wait_for(self._send(name, channel, seconds))
                self._compute(run.title, run.backward, run.module)
            case Transfer() as one:
                waited = following is not None and isinstance(following.instruction, Wait)
                self._start(
                    one, now.transfer, awaited=waited and following.transfer == now.transfer
                )
            case HostCopy() as one:
                self._sent[now.transfer] = self._copy(one)
            case Wait():
                sent = self._sent.pop(now.transfer)
                if sent.delay is not None:
                    self._progress()
                    self._slow_down(sent.name, sent.delay.due())
                self._wait_for(sent)
                self._compute(f"empty the buffer: {sent.name}", sent.empty)
            case Update() as one:
                self._update(one)

    def _update(self, one: Update) -> None:
        """Schedule the optimizer's kernels, after all gradients."""
        self._order()
        self._phase = "update"
        kernels, copies = self.prices.update.of(one)
        self._updated += kernels + copies
        self._compute(HOST_UPDATE if one.by_host else UPDATE, kernels)
        self._compute(STATE_COPIES, copies)
        self._phase = "forward"  # of the next call

    def _run_of(self, one: Forward) -> Run:
        """The run of a region, priced by its operators; that of equal operators is kept."""
        if one.ops not in self._priced_runs:
            self._priced_runs[one.ops] = self._new_run(one)
        return self._priced_runs[one.ops]

    def _new_run(self, one: Forward) -> Run:
        known = [(name, op) for name in one.ops if (op := self.prices.ops.get(name)) is not None]
        module = _common_module([op.module for _, op in known])
        count = f"{len(known)} operators"
        return Run(
            f"{module}: {count}" if module else count,
            module,
            sum(op.forward for _, op in known),
            sum(op.backward for _, op in known),
            [(f"in {name}", *sent) for name, op in known for sent in op.inner],
            [(f"gradient in {name}", *sent) for name, op in known for sent in op.inner_backward],
        )

    def _start(self, one: Transfer, number: Hashable, *, awaited: bool) -> None:
        """Start a transfer; operators beside it are delayed unless it is `awaited` at once."""
        if id(one) not in self._priced:
            self._priced[id(one)] = self._price_of(one)
        name, seconds, exposed = self._priced[id(one)]
        name = self._numbered(name)
        self._compute(f"fill the buffer: {name}", seconds.fill)
        sent = self._send(name, one.channel, seconds.link, seconds.empty)
        if not awaited:
            self._progress()
            sent = self._delays.add(self.prices.links[axis_of(one.channel)], sent, exposed)
        self._sent[number] = sent

    def _numbered(self, name: str) -> str:
        """The name of a transfer with the number of its micro-batch."""
        return name

    def _copy(self, one: HostCopy) -> Sent:
        """Schedule a copy to the host or from it."""
        seconds, name = self.prices.host_copy(one), f"copy {one.channel}: {one.value}"
        if self.prices.host_streams:
            task = self._add(name, self._copies[one.channel], seconds, self._behind)
        else:
            self._compute(name, seconds)
            task = self._last
        return Sent(-1, task, name, 0.0, seconds)

    def _price_of(self, one: Transfer) -> tuple[str, TransferSeconds, float]:
        """The name and the seconds of a transfer, and the fraction that delays operators."""
        purpose = self._kinds[one.handle]
        name = _NAMES.get(purpose, f"{one.collective.value}: {one.parts[0].value}")
        hidden = self.prices.hidden(one, purpose)
        return name.format(len(one.parts)), self.prices.transfer(one), 1 - hidden

    def _send(self, name: str, channel: str, seconds: float, empty: float = 0.0) -> Sent:
        """Schedule a collective after all earlier computation and waits."""
        seconds += self._lost.get(self._count, 0.0)
        after, own = self._behind, self.prices.links[axis_of(channel)]
        task = self._add(name, self._tracks[own], seconds, after)
        sent = Sent(self._count, task, name, empty, seconds)
        self._count += 1
        self._before.append(self._computed)
        for other, track in self._tracks.items():
            part = 0.0 if other == own else seconds * self._contends(own, other)
            if part:
                self._add(name, track, part, after, idle=True)
        return sent

    def _contends(self, one: str, other: str) -> float:
        """The fraction of its time by which a transfer on a link delays those on another."""
        key = one, other
        if key not in self._contention:
            self._contention[key] = self.prices.contention(one, other)
        return self._contention[key]

    def _wait_for(self, sent: Sent) -> None:
        self._waits.append(sent.task)
        own = sent.seconds * (1 - sent.delay.exposed if sent.delay else 1)
        ahead = self.made.ends[sent.task] - self.made.free[self._here]
        self._waited_for += max(0.0, min(own, ahead))
        if sent.number >= 0:
            self._awaited.append(sent.number)

    def _order(self) -> None:
        """Record that the next computation waits for the latest of the awaited collectives."""
        if self._awaited:
            self._orderings.append((self._computed, max(self._awaited)))
            self._awaited = []

    def _compute(self, name: str, seconds: float, module: str = "") -> None:
        if not seconds:
            return
        self._order()
        self._computed += seconds
        self._last = self._run(name, seconds, module)
        self._slow_down(*self._delays.beside(seconds))

    def _slow_down(self, name: str, seconds: float) -> None:
        """Leave the compute stream idle because of a transfer in flight."""
        if seconds:
            self._last = self._run(f"slowed down: {name}", seconds, idle=True)

    def _run(self, name: str, seconds: float, module: str = "", *, idle: bool = False) -> int:
        """Schedule a task on the compute stream, behind all waits."""
        self._progress()
        after, self._waits, self._waited_for = tuple(self._waits), [], 0.0
        return self._add(name, self._here, seconds, after, module, idle=idle)

    def _progress(self) -> None:
        """Let transfers in flight progress while the compute stream waits for others."""
        free = self.made.free[self._here]
        until = max((self.made.ends[task] for task in self._waits), default=free)
        if until - free > self._waited_for:
            self._delays.idle(free, until, until - free - self._waited_for)
            self._waited_for = until - free

    @property
    def _behind(self) -> tuple[int, ...]:
        """The tasks that the next transfer depends on."""
        return (*self._waits, self._last) if self._last >= 0 else tuple(self._waits)

    def _add(
        self,
        name: str,
        track: Track,
        seconds: float,
        after: tuple[int, ...],
        module: str = "",
        *,
        idle: bool = False,
    ) -> int:
        """Schedule a task and return its number."""
        return self.made.add(Task(name, track, Seconds(seconds), after, self._phase, module, idle))


def timed(order: Iterable[Item]) -> list[Item]:
    """The instructions that take time, and loops of such."""
    return [
        one
        for one in order
        if (timed(one.iteration(0)) if isinstance(one, Loop) else isinstance(one[0], _TIMED))
    ]


def first_of(one: Item) -> Played:
    """The first instruction of a loop that takes time."""
    while isinstance(one, Loop):
        one = timed(one.iteration(0))[0]
    return one


def _common_module(modules: Sequence[str]) -> str:
    """The path of the innermost module that contains all `modules`; "" for the model itself."""
    if not modules:
        return ""
    paths = [module.split(".") for module in dict.fromkeys(modules)]
    common = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common += 1
    return ".".join(paths[0][:common])
