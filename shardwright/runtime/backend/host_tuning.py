"""Tuning of the host for ranks that compute on CPUs: the allocator, thread scheduling, waiting.

Nothing here happens unless `Gloo.tune_host` is called: it changes the whole process.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import final

import torch.distributed as dist

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of parameters in glibc's malloc.h
_NEVER = -1  # as a trim threshold
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
_TASKS = Path("/proc/self/task")  # of Linux
_NAMES = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})
# Fitted to two to four ranks on a host of two cores.
_YIELDS = 50  # yields of the core between two readings of the clocks
_MOST_READINGS = 400  # before the wait sleeps, about 10 ms if no other thread needs the core
SPIN_BYTES = 2**23  # for larger messages Gloo's threads need the core themselves


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Make `malloc` keep freed memory for later allocations; return whether it does so now.

    glibc returns large freed blocks, and free memory at the end of the heap, to the system; the
    pages of the next operator are then mapped and zeroed one by one, which takes up to half of the
    time of a convolution. The peak memory of the process does not change. Nothing is done if the
    user has set any of this by environment variables of mallopt(3), or if `malloc` is not glibc's.
    A second call changes nothing.
    """
    tuned = "glibc.malloc." in environment.get("GLIBC_TUNABLES", "")
    if tuned or any(name in environment for name in _USERS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_MAX, 0))


def have_senders_take_turns(tasks: Path = _TASKS) -> int:
    """Schedule Gloo's threads of this process as `SCHED_BATCH`; return the number of such threads.

    The thread that listens to a connection polls for the connection's lock while another thread
    holds the lock and is about to send. If it wakes up on the core of that thread, it preempts it
    and polls in vain until the next scheduler tick, milliseconds later. Threads with `SCHED_BATCH`
    do not preempt others when they wake up. This changes the threads of all existing process groups
    and leaves threads with another scheduling policy, and other systems than Linux, unchanged. A
    second call changes nothing.
    """
    if not dist.is_initialized():
        return 0
    found = 0
    for task in tasks.glob("*"):
        with suppress(OSError):  # it has just ended, or the system does not let us
            if (task / "comm").read_text().strip() in _NAMES:
                found += _take_turns(int(task.name))
    return found


def _take_turns(thread: int) -> bool:
    if os.sched_getscheduler(thread) == os.SCHED_OTHER:
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return os.sched_getscheduler(thread) == os.SCHED_BATCH


@final
class SpinningWait:
    """Spins while it waits for a collective of Gloo's threads, and sleeps if the wait gets long.

    If all threads on a core of a virtual machine sleep, the core returns to the host, and getting
    it back takes as long as many messages. So the waiting thread spins for some milliseconds, and
    yields the core to any thread that can run.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when it is done; raises what went wrong."""
        for _ in range(_MOST_READINGS):
            start, ours = time.perf_counter(), time.process_time()
            for _ in range(_YIELDS):
                if self._work.is_completed():
                    self._work.wait()
                    return
                os.sched_yield()
            # If no thread of this rank ran for half of the time, other processes need the core.
            if time.perf_counter() - start > 2 * (time.process_time() - ours):
                break
        self._work.wait()
