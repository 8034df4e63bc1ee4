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
_YIELDS = 50  # between two looks at the clocks
_LOOKS = 400  # together some 10 ms, if nobody else wants the core; longer waits sleep
AWAKE_BYTES = 2**23  # more is work for Gloo's threads, which want a core for themselves


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have `malloc` keep what is freed for what is allocated next; whether it does now.

    glibc gives large blocks back to the system as they are freed, and the end of the heap too, and
    the next operator's pages are mapped and zeroed one by one: up to half of what a convolution
    takes. A process's peak stays what it is. Nothing is done where the user has set any of this
    by variables of mallopt(3), or where `malloc` is not glibc's. Again, it changes nothing.
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
    """Have Gloo's threads of this process wait for each other to leave the core; how many do.

    The thread that listens to a connection asks for its lock again and again while another one has
    it and is about to send. Where it wakes up on that one's core it takes the core, and asks in
    vain until the scheduler looks again, milliseconds later. So the threads become such
    as take no core from another as they wake up (`SCHED_BATCH`): those of all process groups that
    are there; again, it changes nothing. On other systems than Linux, and where a user gave them
    another scheduling policy, they stay as they are.
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
class Awake:
    """Waits for a collective of Gloo's threads without sleep, as long as it is short.

    A core of a virtual machine on which all threads sleep goes back to the host; until it is at
    work again takes as long as many messages do. So who waits stays awake for some milliseconds,
    and yields the core to whoever has work for it.
    """

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when it is done; raises what went wrong."""
        for _ in range(_LOOKS):
            start, ours = time.perf_counter(), time.process_time()
            for _ in range(_YIELDS):
                if self._work.is_completed():
                    self._work.wait()
                    return
                os.sched_yield()
            # Of time in which no thread of this rank runs others had the core, who want it.
            if time.perf_counter() - start > 2 * (time.process_time() - ours):
                break
        self._work.wait()
