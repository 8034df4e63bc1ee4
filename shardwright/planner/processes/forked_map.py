"""Computes in forked processes what a search is about to ask for.

Forked processes inherit the graph, its tables and all caches without a copy, and only results are
pickled. A result is one that the calling code would find by itself, and it does so where there is
none. So plans, bounds and errors are those of one process, whatever the number of processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar, final

Item = TypeVar("Item")
Result = TypeVar("Result")
_LEAST_SECONDS = 0.05  # of an item; processes for shorter ones take longer than they save
# Libraries whose threads draw progress bars: they hold no lock that the processes take, which print
# nothing.
_DRAWING = ("rich.", "tqdm.")
_WIDTH = 4  # bytes of a number in a queue
_MOST_QUEUED = 1024  # numbers, which the smallest buffer of a pipe holds; others are not computed
_ENDED = (EOFError, ConnectionError)  # a process that the system killed


def usable_cores() -> int:
    """The number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class ForkedMap:
    """Applies functions to items in at most `processes` processes at a time, this one among them.

    `begin` is called at the beginning of each other process.

    The first item is computed in the calling process until one takes long enough to make processes
    worth their start. No process is started where that may be unsafe: not on Linux, in a daemonic
    process, beside other threads, or after torch initialised an accelerator or a process group.
    """

    def __init__(self, processes: int, begin: Callable[[], None] | None = None) -> None:
        self.processes, self._begin = processes, begin
        self._seconds = 0.0  # of the longest item that was computed here

    def __call__(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> list[Result | None]:
        """The results that were computed, in order of the items; None for each other item.

        Items whose function raised an error have none, nor have any with one process. An interrupt
        ends all processes.
        """
        found: list[Result | None] = [None] * len(items)
        if len(items) < 2 or self.processes < 2 or not may_fork():
            return found
        first = 0
        if self._seconds < _LEAST_SECONDS:
            start = time.perf_counter()
            found[0], first = _tried(function, items[0]), 1
            self._seconds = max(self._seconds, time.perf_counter() - start)
        if self._seconds >= _LEAST_SECONDS and len(items) - first > 1:
            self._fork(function, items, range(first, len(items)), found)
        return found

    def _fork(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        numbers: Sequence[int],
        found: list[Result | None],
    ) -> None:
        """Compute the items of these numbers, each in the process that is free first.

        The calling process is one of them and takes the first item, which is needed first: what it
        caches on the way stays.
        """
        context = multiprocessing.get_context("fork")
        pipes: dict[Connection, multiprocessing.process.BaseProcess] = {}
        with _queue(numbers[1:]) as left:
            try:
                with _quietly(), suppress(OSError):  # no memory for more processes
                    for _ in range(min(self.processes, len(numbers)) - 1):
                        here, there = context.Pipe()
                        given = function, items, left, there, (*pipes, here), self._begin
                        process = context.Process(target=_serve, args=given, daemon=True)
                        with there:
                            process.start()
                        pipes[here] = process
                found[numbers[0]] = _tried(function, items[numbers[0]])
                for number in _taken(left):
                    found[number] = _tried(function, items[number])
                for pipe in pipes:
                    with suppress(*_ENDED):
                        for number, data in pipe.recv():
                            found[number] = pickle.loads(data)
            finally:
                for pipe, child in pipes.items():
                    pipe.close()
                    child.kill()
                    child.join()
                    child.close()


def may_fork() -> bool:
    """Whether forked processes of this one can compute: see `ForkedMap`."""
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return False
    others = {*threading.enumerate()} - {threading.current_thread()}
    if any(not type(one).__module__.startswith(_DRAWING) for one in others):
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return True
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (grouped or torch.cuda.is_initialized() or torch.xpu.is_initialized())


def _serve(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    left: int,
    answer: Connection,
    inherited: Sequence[Connection],
    begin: Callable[[], None] | None,
) -> None:
    """The work of a process: items whose numbers it takes, whose results it sends at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent is interrupted, and ends it
    gc.disable()  # a collection would copy all inherited pages
    for one in inherited:
        one.close()
    try:
        if begin is not None:
            begin()
        # Not one by one: the parent computes meanwhile and reads none.
        answer.send([(n, _pickled(_tried(function, items[n]))) for n in _taken(left)])
    finally:
        os._exit(0)  # flushes no stream: what they hold is the parent's


def _tried(function: Callable[[Item], Result], item: Item) -> Result | None:
    """The result; None where there is an error, which the calling code will meet by itself."""
    try:
        return function(item)
    except Exception:  # any: the serial search raises the same one, where it is due
        return None


def _pickled(result: object) -> bytes:
    try:
        return pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps(None)


@contextmanager
def _queue(numbers: Sequence[int]) -> Iterator[int]:
    """A pipe that holds these numbers, of which each is read by one process."""
    reading, writing = os.pipe()
    try:
        with os.fdopen(writing, "wb") as end:
            end.write(b"".join(n.to_bytes(_WIDTH, "big") for n in numbers[:_MOST_QUEUED]))
        yield reading
    finally:
        os.close(reading)


def _taken(queue: int) -> Iterator[int]:
    """Take numbers from a queue until it is empty."""
    while number := os.read(queue, _WIDTH):
        yield int.from_bytes(number, "big")


@contextmanager
def _quietly() -> Iterator[None]:
    """Interrupts wait, and Python does not warn of threads, such as those of BLAS."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
