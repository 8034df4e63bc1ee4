"""Transfers in flight, and by how much they delay the operators beside them.

While a transfer is in flight, operators run at the fraction `1 - exposed` of their speed, where
`exposed` is what the machine does not hide of its seconds: a transfer of L seconds delays them by
`exposed` L if there are enough. What is left is due where the transfer is waited for, and so is all
of a transfer of which nothing is hidden, as nothing runs beside it. So operators and what is
exposed always add up on the compute stream; only what stands between a transfer and its wait, such
as messages to other stages, depends on the rate. A transfer that ends while the stream waits for
another one delays nothing any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final


@dataclass(slots=True, eq=False)
class Delay:
    """Seconds by which a transfer still delays the compute stream; `exposed` of its seconds."""

    name: str
    task: int
    left: float
    exposed: float

    @property
    def rate(self) -> float:
        """Seconds by which a second of an operator beside the transfer takes longer."""
        return self.exposed / (1 - self.exposed)

    def due(self) -> float:
        """Take off what is left, at the wait for the transfer."""
        seconds, self.left = self.left, 0.0
        return seconds


class Sent(NamedTuple):
    """A collective in flight: its number, its task, and the seconds to empty its buffer.

    `delay` is what it delays operators by. A copy to the host or from it has the number -1: ranks
    do not wait for each other in it.
    """

    number: int
    task: int
    name: str
    empty: float
    seconds: float
    delay: Delay | None = None


@final
class Delays:
    """The delays of the transfers in flight, by link, in the order in which they started."""

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = ends  # by task
        self._beside: dict[str, deque[Delay]] = {}  # of transfers of which a part is hidden
        self._serial: dict[str, deque[Delay]] = {}  # of the others

    def add(self, link: str, sent: Sent, exposed: float) -> Sent:
        """The transfer with its delay, if not all of it is hidden."""
        if not sent.seconds * exposed:
            return sent
        delay = Delay(sent.name, sent.task, sent.seconds * exposed, exposed)
        queues = self._serial if exposed >= 1 else self._beside
        queues.setdefault(link, deque()).append(delay)
        return sent._replace(delay=delay)

    def beside(self, seconds: float) -> tuple[str, float]:
        """The seconds by which an operator takes longer, and the first transfer it is due to.

        They no longer count for later operators.
        """
        name, total = "", 0.0
        for queue in self._beside.values():
            rest = seconds
            while queue and rest > 0:
                delay = queue[0]
                paid = min(delay.left, rest * delay.rate)
                delay.left -= paid
                rest -= paid / delay.rate
                name, total = name or delay.name, total + paid
                if delay.left:
                    break
                queue.popleft()
        return name, total

    def idle(self, now: float, until: float, seconds: float) -> None:
        """Take off what is left of transfers that end while the compute stream waits for others.

        No more than `seconds`, in which what it waits for has not progressed. What is left of one
        that ends later stays as it is, so that a step repeats exactly.
        """
        for queue in self.in_flight(now):
            for delay in queue:
                if self._ends[delay.task] > until:
                    break
                paid = min(delay.left, seconds)
                delay.left -= paid
                seconds -= paid

    def left(self, now: float) -> list[list[float]]:
        """The seconds that are left of transfers in flight, and those until they end, by link."""
        found = [[delay.left for delay in queue] for queue in self.in_flight(now)]
        serial = [[self._ends[one.task] - now for one in queue] for queue in self._serial.values()]
        return found + serial

    def replace(self, others: dict[Delay, Delay]) -> None:
        """Replace delays by those of other transfers."""
        for queue in chain(self._beside.values(), self._serial.values()):
            kept = [others.get(delay, delay) for delay in queue]
            queue.clear()
            queue.extend(kept)

    def in_flight(self, now: float) -> Iterator[deque[Delay]]:
        """By link, delays that change; what is left of others is due at their waits."""
        for queue in self._serial.values():
            while queue and self._ends[queue[0].task] <= now:
                queue.popleft()
        for queue in chain(self._beside.values(), self._serial.values()):
            while queue and not queue[0].left:
                queue.popleft()
            yield queue
