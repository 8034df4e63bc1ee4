"""Makes Gloo's send and receive threads take turns.

The thread that listens to a connection asks for its lock again and again while another one has it
and is about to send. Where it wakes up on that one's core it takes the core, and asks in vain
until the scheduler looks again, milliseconds later (ADR 0067).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

_TASKS = Path("/proc/self/task")  # of Linux
_NAMES = frozenset({"gloo_tcp_loop", "pt_gloo_runloop"})


def have_senders_take_turns(tasks: Path = _TASKS) -> int:
    """Have Gloo's threads of this process wait for each other to leave the core; how many do.

    They become threads of the kind that takes no core from another as it wakes up
    (`SCHED_BATCH`). Those of all process groups that are there; again, it changes nothing. On other
    systems than Linux, and where a user gave them another kind, they stay as they are.
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
