"""Times kernels on a GPU behind others that keep it busy, so that the host's part does not count.

A single small kernel with a wait after it takes as long as the host needs to issue it and to be
told that it is done. In a training step the device has work enqueued, and the kernel takes what it
takes. So a long kernel is enqueued first, and the runs behind it, between two events. The runs are
timed if the device had not begun them when the host had issued the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple, Protocol, final

import torch

_SIDE = 4096  # of the square matrices whose product keeps the device busy
_MOST_RUNS = 16
# Of the host, to issue a batch of runs. Devices hold about a thousand kernels that have not begun,
# and the host waits with the next one; it takes some microseconds for each.
_MOST_SECONDS = 4e-3
_TRIES = 4


class QueueTimes(NamedTuple):
    """Seconds of one run: of the device, and of the host that issues it."""

    device: float
    host: float


class Event(Protocol):
    """A place in the device's queue, as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the device has come to it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds up to a later one."""


class Queue(Protocol):
    """The kernels that a device has still to run."""

    def event(self) -> Event: ...

    def occupy(self, products: int) -> None:
        """Enqueue so many large kernels."""

    def synchronize(self) -> None:
        """Wait for the device."""


@final
class CudaQueue:
    """The current stream of the current GPU."""

    def __init__(self) -> None:
        shape = (3, _SIDE, _SIDE)
        self._left, self._right, self._out = torch.zeros(shape, device="cuda").unbind()

    def event(self) -> Event:
        """An event that has its time."""
        return torch.cuda.Event(enable_timing=True)

    def occupy(self, products: int) -> None:
        """Enqueue so many products of large matrices."""
        for _ in range(products):
            torch.mm(self._left, self._right, out=self._out)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()


@final
class QueuedTimer:
    """Times functions behind kernels that keep a device busy."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        queue.occupy(1)  # the first one is slow
        queue.synchronize()
        start, end = queue.event(), queue.event()
        start.record()
        queue.occupy(2)
        end.record()
        queue.synchronize()
        self.product_seconds = max(1e-6, start.elapsed_time(end) / 2e3)

    def measure(self, run: Callable[[], object], most: int) -> QueueTimes:
        """The seconds of a run, a mean over `most` of them or fewer.

        If the device catches up with the host, half as many runs are issued behind twice as many
        kernels in the next try; the last try counts in any case.
        """
        self.queue.synchronize()
        begun = time.perf_counter()
        run()
        host = max(1e-6, time.perf_counter() - begun)
        runs = max(1, min(most, _MOST_RUNS, int(_MOST_SECONDS / host)))
        products = 1 + ceil(2 * runs * host / self.product_seconds)
        for _ in range(_TRIES):
            found, ahead = self._try(run, runs, products)
            if ahead:
                break
            runs, products = max(1, runs // 2), 2 * products
        return found

    def _try(self, run: Callable[[], object], runs: int, products: int) -> tuple[QueueTimes, bool]:
        """The seconds of a run, and whether the host was ahead of the device throughout."""
        start, end = self.queue.event(), self.queue.event()
        self.queue.synchronize()
        self.queue.occupy(products)
        start.record()
        begun = time.perf_counter()
        for _ in range(runs):
            run()
        host = time.perf_counter() - begun
        ahead = not start.query()
        end.record()
        self.queue.synchronize()
        return QueueTimes(start.elapsed_time(end) / 1e3 / runs, host / runs), ahead
