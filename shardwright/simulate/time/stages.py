"""Simulates the step programs of all groups of a pipeline: compute, collectives and messages.

Each group has its own streams (`step_program.py`). A message starts when one group has started to
send it and the other to receive it. A channel transfers one message at a time. Beside collectives
of both groups on links that it shares it has a part of them, and delays what they start behind it.
Groups advance in the order of simulated time, so that the operation that starts first gets a link
first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Generic, TypeVar

from shardwright.ir.layout import Seconds
from shardwright.ir.pipeline import AXIS
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.timeline import Stream, Timeline, Track
from shardwright.program.step.channels import axis_of, members
from shardwright.program.step.folding.sections import Sections
from shardwright.program.step.folding.steady_passes import RepeatedPasses
from shardwright.program.step.folding.unrolled import Item, Loop, Played, in_order, unrolled
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Gradients,
    Recv,
    Send,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.purposes import purposes
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.time.backward_parts import parts_to_inputs
from shardwright.simulate.time.links import (
    GroupPart,
    Links,
    is_message,
    messages_contend,
    name_of,
)
from shardwright.simulate.time.steady_state import repeated
from shardwright.simulate.time.step_program import END, StepPrices, first_of, timed
from shardwright.simulate.time.step_seconds import Clock, LoopPlayer
from shardwright.simulate.time.timeline import TaskSchedule

Lost = Mapping[int, float]  # seconds that a group waits for its slowest rank, by collective


Repeats = Sequence[RepeatedPasses] | None  # for each group; None: all passes run once


def simulated_stages(
    programs: Sequence[StepProgram],
    prices: Sequence[StepPrices],
    names: Sequence[str],
    repeats: Repeats = None,
) -> Timeline:
    """The timeline of a step on all groups of a pipeline.

    Args:
        programs: the step program of one rank of each group.
        prices: the prices of each group.
        names: the name of each group.
        repeats: the passes that stand for those of other micro-batches.

    Raises:
        PipelineError: the groups wait for each other.
        SteadyStateError: passes leave other transfers in flight than they find.
    """
    parts = _repeated([(one, in_order(one)) for one in programs], repeats)
    return _played(TaskSchedule, parts, prices, names).made.timeline


def stages_seconds(
    programs: Sequence[Sections | StepProgram],
    prices: Sequence[StepPrices],
    repeats: Repeats = None,
) -> Seconds:
    """The seconds of the timeline of a step on all groups of a pipeline, without the timeline.

    Cycles of passes are played until one, or two together, make all groups as much later as the one
    or two before did: the others do so, too (`step_seconds.py`; Baccelli et al., section 3.7).

    Args:
        programs: the step program of one rank of each group; one in sections stands for that of
            the whole graph.
        prices: the prices of each group.
        repeats: the passes that stand for those of other micro-batches.

    Raises:
        PipelineError: the groups wait for each other.
        SteadyStateError: passes leave other transfers in flight than they find.
        NotPeriodicError: it cannot be told which transfer a layer waits for.
    """
    parts = [
        (one.program, unrolled(one)) if isinstance(one, Sections) else (one, in_order(one))
        for one in programs
    ]
    names = [f"group {i}" for i in range(len(parts))]
    times = repeats[0].times if repeats else 0
    cycles, odd = _FIRST_CYCLES, times % 2
    while repeats and cycles + odd < times:
        played = cycles + odd  # so that pairs of cycles are left out
        found = _played(Clock, _repeated(parts, repeats, played), prices, names)
        if (shift := found.shift()) is not None:
            return Seconds(found.made.seconds + (times - played) // 2 * shift)
        cycles *= 2
    return _played(Clock, _repeated(parts, repeats), prices, names).made.seconds


# A group's program, and its instructions in order.
_Program = tuple[StepProgram, Sequence[Item]]


def _repeated(
    parts: Sequence[_Program], repeats: Repeats, played: int | None = None
) -> Sequence[_Program]:
    """The programs with passes repeated for micro-batches that were left out.

    With `played` their cycle runs so many times, in a step that has as many as `repeats` say.
    """
    if repeats is None:
        return parts
    pairs = zip(parts, repeats, strict=True)
    return [(program, repeated(order, repeat, played)) for (program, order), repeat in pairs]


_FIRST_CYCLES = 4  # that are played before it is known that they repeat
_NEAR = 1e-13  # relative difference of times that count as equal
_Made = TypeVar("_Made", bound=TaskSchedule)


def _played(
    made: Callable[[], _Made],
    programs: Sequence[_Program],
    prices: Sequence[StepPrices],
    names: Sequence[str],
) -> _Pipeline[_Made]:
    """The played programs, with the seconds that groups wait for their slowest ranks."""
    found = made()
    first = _Pipeline(found, programs, prices, names, [{}] * len(programs))
    lost = [
        {} if price.late is None else player.lost(price.late)
        for player, price in zip(first.players, prices, strict=True)
    ]
    if any(lost):
        found = made()
        return _Pipeline(found, programs, prices, names, lost)
    return first


class _Pipeline(Generic[_Made]):
    """Plays the programs of all groups in the order of simulated time."""

    def __init__(
        self,
        made: _Made,
        programs: Sequence[_Program],
        prices: Sequence[StepPrices],
        names: Sequence[str],
        lost: Sequence[Lost],
    ) -> None:
        self.made = made
        self.done: dict[tuple[str, int], int] = {}  # operation of several groups -> its task
        self.links = Links()
        # Whether messages delay collectives, so that the order of their starts matters.
        pairs = zip(programs, prices, strict=True)
        self.contends = any(messages_contend(program, price) for (program, _), price in pairs)
        self.players = [
            _Group(self, group, *one)
            for group, one in enumerate(zip(programs, prices, names, lost, strict=True))
        ]
        # The time at which each group can play its next instruction: only its own change it.
        self._now = {group: player.now for group, player in enumerate(self.players)}
        left = {group: player.steps() for group, player in enumerate(self.players)}
        while left:
            group = self._next()
            if group is None:
                raise PipelineError("the groups of the pipeline wait for each other")
            if next(left[group], None) is None:
                del left[group], self._now[group]
            else:
                self._now[group] = self.players[group].now

    def _next(self) -> int | None:
        """The group that can play an instruction first; None if all wait for each other."""
        found, first = None, inf
        for group, now in self._now.items():
            if now < first and not self.players[group].is_blocked:
                found, first = group, now
        return found

    def shift(self) -> float | None:
        """The seconds by which two more cycles of passes make all groups later.

        None unless the last two cycles made all streams that they use as much later, or each of
        the last two pairs of cycles did.
        """
        for period in (1, 2):
            if (found := self._repeats(period)) is not None:
                return 2 / period * found
        return None

    def _repeats(self, period: int) -> float | None:
        """The seconds by which each of the last `period` cycles, and those before them, shift."""
        seconds = max(self.made.free.values(), default=0.0)
        found = None
        for player in self.players:
            if len(player.cycle_ends) <= 2 * period:
                return None
            for ends in zip(*player.cycle_ends[-2 * period - 1 :], strict=True):
                if len(set(ends)) == 1:
                    continue  # a stream that they do not use
                for one, other in zip(ends, ends[period:], strict=False):
                    found = other - one if found is None else found
                    if abs(other - one - found) > _NEAR * seconds:
                        return None
        return found

    def times(self) -> dict[int, float]:
        """The time at which each group can play its next instruction, if it can."""
        now, players = self._now, self.players
        return {group: now[group] for group in now if not players[group].is_blocked}


class _Group(LoopPlayer):
    """Plays the program of one group of the pipeline."""

    def __init__(
        self,
        pipeline: _Pipeline[Any],
        group: int,
        given: _Program,
        prices: StepPrices,
        ranks: str,
        lost: Lost,
    ) -> None:
        program, self._items_given = given
        super().__init__(purposes(program), prices, ranks, pipeline.made, lost)
        self._pipeline, self._group, self._program = pipeline, group, program
        self._keys: dict[Hashable, tuple[str, int]] = {}  # name -> operation of several groups
        self._needs: tuple[str, int] | None = None  # what the next instruction waits for
        self._messages = {
            one.channel: Track(ranks, Stream.COMMUNICATION, one.channel)
            for one in program.messages()
            if isinstance(one, Recv)
        }
        self._to_inputs = parts_to_inputs(program)
        self._calls = {one.call: one for one in program.instructions if isinstance(one, Forward)}
        self._computing: dict[int, float] = {}  # by the identity of a loop, of one iteration
        self.quiet = 0.0  # seconds of computation before the next message, at least
        self.cycle_ends: list[list[float]] = []  # of a loop of passes: when each stream is free
        self._later = 0  # how many micro-batches instructions have been repeated for

    @property
    def is_blocked(self) -> bool:
        """Whether the next instruction waits for an operation that not all groups have started."""
        return self._needs is not None and self._needs not in self._pipeline.done

    @property
    def now(self) -> float:
        """The time at which the next instruction can start."""
        return max((self.made.ends[task] for task in self._behind), default=0.0)

    def steps(self) -> Iterator[bool]:
        """Play the program, one instruction at a time; also yields while `is_blocked`."""
        yield from self._steps(self._items_given, END)
        self._order()

    def _steps(self, order: Sequence[Item], end: Item) -> Iterator[bool]:
        """Play some instructions, which `end` follows."""
        items = timed(order)
        yield from self._play_items(items, self._until_messages(items), end)

    def _play_items(
        self, items: Sequence[Item], quiet: Sequence[float], end: Item
    ) -> Iterator[bool]:
        """Play instructions that take time; `quiet` is that of `_until_messages`."""
        for at, (now, following) in enumerate(pairwise([*items, end])):
            if isinstance(now, Loop):
                if now.micro_batches:
                    yield from self._micro_batches(now, following)
                else:
                    self.quiet = quiet[at + 1]
                    yield from self._iterations(now, following)
                continue
            self.quiet = quiet[at]
            if isinstance(now.instruction, Wait):
                self._needs = self._keys.get(now.transfer)
                if self.is_blocked:
                    yield True
                self._needs = None
            self._play(now, first_of(following))
            self.quiet = quiet[at + 1]
            yield True

    def _until_messages(self, items: Sequence[Item]) -> list[float]:
        """For each instruction, the seconds of computation from it to the next message."""
        found = [0.0]
        for one in reversed(items):
            found.append(0.0 if is_message(one) else found[-1] + self._seconds_of(one))
        return found[::-1]

    def _seconds_of(self, item: Item) -> float:
        """The seconds of computation of an instruction, at least."""
        if isinstance(item, Loop):
            if id(item) not in self._computing:
                self._computing[id(item)] = sum(map(self._seconds_of, item.iteration(0)))
            return item.times * self._computing[id(item)]
        match item.instruction:
            case Forward() as one:
                return self._run_of(one).forward
            case Backward(part=Gradients.ALL) as one:
                return self._run_of(self._calls[one.call]).backward
        return 0.0

    def _micro_batches(self, loop: Loop, following: Item) -> Iterator[bool]:
        """Play passes of all micro-batches of a loop, between which messages are waited for."""
        items = timed(loop.iteration(0))  # all iterations are equal
        quiet, lasting = self._until_messages(items), self._sent.keys() - loop.renames.values()
        for number in range(loop.times):
            computed, waits = self._computed, len(self._orderings)
            if number:
                self._rename(loop.renames)
                self._later += loop.micro_batches
            behind = self._behind_iteration(loop, number, following)
            yield from self._play_items(items, quiet, behind)
            free = [self.made.free[track] for track in self._own]  # the first one computes
            self.cycle_ends.append([*free, free[0] + sum(map(sum, self._delays.left(free[0])))])
        if len(self._orderings) == waits:  # the next wait for the slowest rank is behind all cycles
            self._computed += loop.left_out * (self._computed - computed)
        elif self.prices.late is not None and not lasting.isdisjoint(self._sent):
            self.cycle_ends = []  # one of these counts what is computed in all cycles

    def _numbered(self, name: str) -> str:
        value, _, number = name.rpartition("@")
        return f"{value}@{int(number) + self._later}" if number.isdigit() and value else name

    def _rename(self, names: Mapping[Hashable, Hashable]) -> None:
        """Give transfers and messages in flight other names."""
        messages = {name: other for name, other in names.items() if name in self._keys}
        self._keys.update([(other, self._keys.pop(name)) for name, other in messages.items()])
        super()._rename({name: other for name, other in names.items() if name not in messages})

    def _iteration(self, loop: Loop, number: int, following: Item) -> Iterator[bool]:
        """Play an iteration; yields at each instruction if messages may delay it."""
        if self._pipeline.contends:
            rest = self.quiet
            coming = (loop.times - 1 - number) * self._seconds_of(loop) / loop.times
            behind = self._behind_iteration(loop, number, following)
            for _ in self._steps(loop.iteration(number), behind):
                self.quiet += coming + rest
                yield True
            self.quiet = rest
        else:
            self._iterate(loop, number, following)

    def _unseen(self, shift: float) -> float:
        """The number of iterations, `shift` seconds each, that end before a message may start."""
        if not self._pipeline.contends or not shift:
            return inf
        players = self._pipeline.players
        others = [
            max(now, players[group].made.free[players[group]._here] + players[group].quiet)
            for group, now in self._pipeline.times().items()
            if group != self._group
        ]
        return max(0.0, (min(others, default=inf) - self.now) / shift - 1)

    def _play(self, now: Played, following: Played) -> None:
        match now.instruction:
            case Send() | Recv() as one:
                self._join(one, now.transfer, one.channel, 2)
            case Transfer() as one if axis_of(one.channel) == AXIS:
                size = len(members(one.channel, self._program.mesh))
                self._join(one, now.transfer, one.channel, size)
            case Wait() if now.transfer in self._keys:
                self._waits.append(self._pipeline.done[self._keys.pop(now.transfer)])
            case Backward(part=Gradients.INPUTS | Gradients.WEIGHTS) as one:
                self._backward_part(one)
            case _:
                super()._play(now, following)

    def _backward_part(self, one: Backward) -> None:
        """Play one of the two parts of a backward pass."""
        self._phase = "backward"
        run, known = self._runs[one.call], self._to_inputs[one.call]
        to_inputs = one.part is Gradients.INPUTS
        if to_inputs:
            for name, channel, seconds in run.inner_backward:
                self._wait_for(self._send(name, channel, seconds))
        seconds = sum(
            op.backward * (part if to_inputs else 1 - part)
            for name, part in known
            if (op := self.prices.ops.get(name)) is not None
        )
        self._compute(f"{run.title}, {one.part.value}", seconds, run.module)

    def _join(self, one: Send | Recv | Transfer, name: Hashable, channel: str, size: int) -> None:
        """Add this group's part of an operation; schedule it if this part is the last."""
        part = GroupPart(self._group, one, self._behind, self._later)
        key, parts = self._pipeline.links.join(channel, size, part)
        self._keys[name] = key
        if parts is None:
            return
        after = tuple(task for part in parts for task in part.after)
        players = self._pipeline.players
        if isinstance(one, Transfer):
            seconds = self.prices.transfer(one).link
            name = f"{one.collective.value}: {one.parts[0].value}"
            groups, home = [players[part.group] for part in parts], self
            track = Track(self.ranks, Stream.COMMUNICATION, channel)
        else:
            (received,) = (part for part in parts if isinstance(part.one, Recv))
            assert isinstance(received.one, Recv), "the other one sends"
            seconds = self.prices.message(received.one)
            name = name_of(received.one, received.later)
            groups, home = [players[part.group] for part in parts], players[received.group]
            track = home._messages[channel]
        beside = max(player._shared_seconds(channel, track, after, seconds) for player in groups)
        self._pipeline.done[key] = home._add(name, track, seconds + beside, after)
        for player in groups:
            for other, shared in player._tracks.items():
                delay = seconds * self._contends(channel, other)
                if shared != track and delay and axis_of(other) != AXIS:
                    player._add(name, shared, delay, after, idle=True)
                    player.disturbed += 1

    def _shared_seconds(
        self, channel: str, track: Track, after: Sequence[int], seconds: float
    ) -> float:
        """Seconds that an operation of several groups takes longer beside collectives of this one.

        While both are in flight they have equal shares of the links that they share.
        """
        free, ends = self.made.free, self.made.ends
        start = max([free.get(track, 0.0), *(ends[task] for task in after)])
        return max(
            (
                self._contends(channel, name) * max(0.0, min(seconds, free.get(other, 0.0) - start))
                for name, other in self._tracks.items()
                if axis_of(name) != AXIS
            ),
            default=0.0,
        )
