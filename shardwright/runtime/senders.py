"""Gloo's threads, which send and receive: on one host they take turns.

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


def ranks_of_a_host(world: int) -> int:
    """How many of `world` ranks are on this host, by torchrun's word; all where that says nothing.

    So they are where hosts do not have equally many.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return local if local > 0 and world % local == 0 else world


def have_senders_take_turns(tasks: Path = _TASKS) -> int:
    """Have Gloo's threads of this process wait for each other to leave the core; how many do.

    They become threads of the kind that takes no core from another as it wakes up
    (`SCHED_BATCH`). Those of all process groups that are there; again, it changes nothing. Where
    ranks are on several hosts they stay as they are: what comes from afar while operators run is
    not to wait for the core. So do all on other systems than Linux, and where a user gave them
    another kind.
    """
    if not dist.is_initialized() or ranks_of_a_host(dist.get_world_size()) < dist.get_world_size():
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
