"""Ends a rank without disturbing the others."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch.distributed as dist

from shardwright.runtime.backend.registry import backend_of

_LETTING_GO_SECONDS = 0.05


def end_within(seconds: float, status: int = 1) -> None:
    """End this process with an exit status after so many seconds, unless it has ended by then.

    Other ranks end only when this one does: torchrun stops them. So a rank that has failed must not
    wait for them, as destructors of communicators may.
    """

    def end() -> None:
        time.sleep(seconds)
        sys.stderr.flush()
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()


def leave(*, failed: bool = False) -> None:
    """Leave the process group, so that the interpreter may end.

    A rank that has `failed` leaves only groups that do not wait for others: NCCL's wait for the
    collectives in flight, which no other rank may ever start.

    A thread of Gloo may still hold the tensors of a finished collective, because DTensor's caches
    keep its group alive. If it releases them while the interpreter ends, the process is aborted
    ("terminate called without an active exception"). So this function waits until it has done so.
    """
    if failed and backend_of().orders_on_device:
        return
    dist.destroy_process_group()
    time.sleep(_LETTING_GO_SECONDS)
