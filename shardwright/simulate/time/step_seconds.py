"""Simulates the seconds of a step, and plays equal layers and micro-batches only until they repeat.

An iteration of a loop maps the times at which streams and links are free to those after it. The map
consists of maxima and sums, so it commutes with a shift of all times (Baccelli et al.,
"Synchronization and Linearity", 1992): once an iteration shifts all times that the next one reads
by the same seconds, all others do, too, and are skipped.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from shardwright.ir.layout import Seconds
from shardwright.ir.timeline import Task, Track
from shardwright.program.step.folding.sections import Sections
from shardwright.program.step.folding.unrolled import Item, Loop, in_order, unrolled
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.time.in_flight import Delay
from shardwright.simulate.time.steady_state import played
from shardwright.simulate.time.step_program import Player, StepPrices, lowered, timed
from shardwright.simulate.time.timeline import TaskSchedule

_EXACT = 1e-13  # relative difference of times that count as equal
_Delaying = tuple[list[tuple[int, int, Delay]], dict[int, float]]  # as `_delaying` finds them


def step_seconds(
    program: StepProgram | Sections, prices: StepPrices, micro_batches: int = 1
) -> Seconds:
    """The seconds of the timeline of a step (`step_program.simulated`), without the timeline.

    Args:
        program: a step program; one in sections stands for that of the whole graph.
        prices: seconds of its instructions.
        micro_batches: micro-batches of the step.

    Raises:
        SteadyStateError: the program's micro-batches cannot be repeated.
        NotPeriodicError: it cannot be told which transfer a layer waits for.
    """
    order: Sequence[Item]
    if isinstance(program, Sections):
        order, program = unrolled(program), program.program
    else:
        order = in_order(program)
    order, kinds = played(order, lowered(program), micro_batches), purposes(program)
    player = LoopPlayer(kinds, prices, "", Clock(), {})
    player.play(order)
    lost = {} if prices.late is None else player.lost(prices.late)
    if lost:
        player = LoopPlayer(kinds, prices, "", Clock(), lost)
        player.play(order)
    return player.made.seconds


class Clock(TaskSchedule):
    """Schedules tasks and keeps only when they end, and how many each track has run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Track] = Counter()

    def keep(self, task: Task, start: float) -> None:
        """Count a task."""
        self.counts[task.track] += 1

    @property
    def seconds(self) -> Seconds:
        """The time at which the last task ends."""
        return Seconds(max(self.free.values(), default=0.0))

    def later(self, number: int, seconds: float) -> int:
        """A task that ends so many seconds after the one with this number; return its number."""
        self.ends.append(self.ends[number] + seconds)
        return len(self.ends) - 1


@dataclass(frozen=True)
class _State:
    """The times after an iteration of a loop that the next ones depend on, and counts so far."""

    free: dict[Track, float]
    counts: dict[Track, int]
    waits: float  # seconds by which the next computation has to wait
    waited_for: float  # seconds of these in which no other transfer has progressed
    in_flight: dict[int, float]  # ends of transfers of this iteration
    collectives: int
    computed: float
    awaited: list[int]  # of the collectives so far, counted backwards
    delays: list[list[float]]  # seconds by which transfers in flight still delay operators

    def shift(self, since: _State) -> float | None:
        """The seconds by which all times are later than in the iteration before; None if any."""
        moved = [track for track, count in self.counts.items() if count != since.counts.get(track)]
        if not moved:
            return 0.0
        near = _EXACT * max(self.free.values())
        later = self.free[moved[0]] - since.free.get(moved[0], 0.0)
        same = (
            self.in_flight.keys() == since.in_flight.keys()
            and self.awaited == since.awaited
            and abs(self.waits - since.waits) <= near
            and abs(self.waited_for - since.waited_for) <= near
            and _are_equal(self.delays, since.delays, near)
            and all(abs(self.free[t] - since.free.get(t, 0.0) - later) <= near for t in moved)
            and all(
                abs(end - since.in_flight[at] - later) <= near for at, end in self.in_flight.items()
            )
        )
        return later if same else None


class LoopPlayer(Player):
    """Plays instructions on a `Clock`; of loops the iterations until they repeat."""

    made: Clock

    def __init__(
        self,
        kinds: Mapping[str, Purpose],
        prices: StepPrices,
        ranks: str,
        made: TaskSchedule,
        lost: Mapping[int, float],
    ) -> None:
        super().__init__(kinds, prices, ranks, made, lost)
        self._own = [self._here, *self._tracks.values(), *self._copies.values()]
        self.disturbed = 0  # tasks on these tracks that others have added

    def _repeat(self, loop: Loop, following: Item) -> None:
        """Play iterations of a loop until they repeat; skip the others."""
        deque(self._iterations(loop, following), maxlen=0)

    def _iterations(self, loop: Loop, following: Item) -> Iterator[bool]:
        """Play iterations of a loop, in the steps of `_iteration`, until they repeat."""
        may_skip = self._ends_equally(loop, following)
        outside = self._outside(loop) if may_skip else []
        same, number = 0, 0
        before, marks, disturbed = self._state(loop, None), self._marks(), self.disturbed
        while number < loop.times:
            yield from self._iteration(loop, number, following)
            now = self._state(loop, number)
            shift = now.shift(before) if self.disturbed == disturbed else None
            same = 0 if shift is None else same + 1
            left = loop.times - 1 - number
            if may_skip and left and shift is not None and same >= max(1, loop.depth):
                left = int(min(left, self._unseen(shift)))
                per = now.collectives - before.collectives
                early = outside[number] <= before.free.get(self._here, 0.0)
                if left and early and self._lose_the_same(per, left) and self._orders(loop):
                    self._skip(loop, number, left, shift, before, marks)
                    number += left
                    now = self._state(loop, number)
            before, marks, disturbed = now, self._marks(), self.disturbed
            number += 1

    def _iteration(self, loop: Loop, number: int, following: Item) -> Iterator[bool]:
        """Play an iteration; yields where others may play."""
        self._iterate(loop, number, following)
        yield from ()

    def _unseen(self, shift: float) -> float:
        """The number of iterations, `shift` seconds each, that end before others may play."""
        return inf

    def _ends_equally(self, loop: Loop, following: Item) -> bool:
        """Whether the last iteration ends as others do; what follows a transfer may wait for it."""

        def is_awaited(number: int) -> bool:
            last, end = (
                timed(loop.iteration(number))[-1],
                self._behind_iteration(loop, number, following),
            )
            return isinstance(last, Loop) or (
                last.transfer is not None and last.transfer == end.transfer
            )

        return is_awaited(0) == is_awaited(loop.times - 1)

    def _orders(self, loop: Loop) -> bool:
        """Whether skipped iterations record waits for the slowest rank like the last one."""
        return self.prices.late is None or bool(self._lost) or not loop.outside(0)

    def _outside(self, loop: Loop) -> list[float]:
        """By iteration, when the last outside transfer ends that it or a later one waits for."""
        found, last = [], 0.0
        for number in reversed(range(loop.times)):
            for name in loop.outside(number):
                last = max(last, self.made.ends[self._sent[name].task])
            found.append(last)
        return found[::-1]

    def _lose_the_same(self, per: int, times: int) -> bool:
        """Whether the next collectives take longer by as much as the last `per`."""
        if not self._lost:
            return True
        lost, first = self._lost, self._count - per
        return all(
            abs(lost.get(first + i, 0.0) - lost.get(first + i + per * n, 0.0))
            <= _EXACT * lost.get(first + i, 0.0)
            for i in range(per)
            for n in range(1, times + 1)
        )

    def _state(self, loop: Loop, number: int | None) -> _State:
        names: Sequence[Hashable] = () if number is None else loop.started(number)
        ends, free = self.made.ends, self.made.free[self._here]
        return _State(
            {track: self.made.free[track] for track in self._own},
            {track: self.made.counts[track] for track in self._own},
            max((ends[task] - free for task in self._waits if ends[task] > free), default=0.0),
            self._waited_for,
            {at: ends[self._sent[n].task] for at, n in enumerate(names) if n in self._sent},
            self._count,
            self._computed,
            [self._count - number for number in self._awaited],
            self._delays.left(free),
        )

    def _marks(self) -> tuple[int, int]:
        return len(self._before), len(self._orderings)

    def _skip(
        self,
        loop: Loop,
        number: int,
        times: int,
        shift: float,
        before: _State,
        marks: tuple[int, int],
    ) -> None:
        """Skip the iterations behind iteration `number`, each of which takes `shift` seconds."""
        per, computed = self._count - before.collectives, self._computed - before.computed
        delays = self._delaying(loop, number)
        for track in self._own:
            if self.made.counts[track] != before.counts.get(track):
                self.made.free[track] += times * shift
        free = self.made.free[self._here]
        self._waits = [self.made.later(task, times * shift) for task in self._waits]
        if self._last >= 0:
            self._last = self.made.later(self._last, free - self.made.ends[self._last])
        self._skip_transfers(loop, number, times, shift, per, delays)
        if self.prices.late is not None and not self._lost:
            added = self._before[marks[0] :]
            orderings = self._orderings[marks[1] :]
            for n in range(1, times + 1):
                self._before += [one + n * computed for one in added]
                self._orderings += [(at + n * computed, i + n * per) for at, i in orderings]
        self._count += times * per
        self._computed += times * computed
        self._awaited = [one + times * per for one in self._awaited]

    def _skip_transfers(
        self, loop: Loop, number: int, times: int, shift: float, per: int, delays: _Delaying
    ) -> None:
        """Leave the transfers in flight that skipped iterations leave."""
        last, (delaying, due) = number + times, delays
        for n in range(1, times + 1):
            for name in loop.outside(number + n):
                del self._sent[name]
        latest = [self._sent.get(name) for name in loop.started(number)]
        for n in range(max(0, number - loop.depth), number + 1):
            for name, lag in zip(loop.started(n), loop.lags, strict=True):
                if lag is not None and n + lag <= last:
                    self._sent.pop(name, None)
        for n in range(number + 1, last + 1):
            for at, (name, lag) in enumerate(zip(loop.started(n), loop.lags, strict=True)):
                sent = latest[at]
                if sent is not None and (lag is None or n + lag > last):
                    steps = n - number
                    task = self.made.later(sent.task, steps * shift)
                    number_then = -1 if sent.number < 0 else sent.number + steps * per
                    delay = sent.delay and replace(sent.delay, task=task, left=due.get(at, 0.0))
                    self._sent[name] = sent._replace(task=task, number=number_then, delay=delay)
        later = [self._sent[loop.started(n + times)[at]].delay for n, at, _ in delaying]
        left = [delay.left for _, _, delay in delaying]
        for _, at, delay in delaying:
            delay.left = due.get(at, 0.0)
        for now, seconds in zip(later, left, strict=True):
            assert now is not None, "all transfers of a place in a loop have the same price"
            now.left = seconds
        self._delays.replace({one[2]: now for one, now in zip(delaying, later, strict=True) if now})

    def _delaying(self, loop: Loop, number: int) -> _Delaying:
        """Transfers that still delay operators; and what was left at last of those before them.

        The first have the iteration that started them and the place in it, the others only this.
        """
        queues = self._delays.in_flight(self.made.free[self._here])
        changing = {delay for queue in queues for delay in queue}
        delaying, due = [], {}
        for n in range(number + 1):
            for at, name in enumerate(loop.started(n)):
                sent = self._sent.get(name)
                if sent is None or sent.delay is None:
                    continue
                if sent.delay in changing:
                    delaying.append((n, at, sent.delay))
                else:
                    due[at] = sent.delay.left
        return delaying, due


def _are_equal(one: list[list[float]], other: list[list[float]], near: float) -> bool:
    """Whether transfers delay operators by equal seconds."""
    return list(map(len, one)) == list(map(len, other)) and all(
        abs(a - b) <= near for a, b in zip(chain(*one), chain(*other), strict=True)
    )
