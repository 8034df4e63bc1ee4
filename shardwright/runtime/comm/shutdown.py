"""Ends a rank without disturbing the others."""

from __future__ import annotations

import time

import torch.distributed as dist

_LETTING_GO_SECONDS = 0.05


def leave() -> None:
    """Leave the process group, so that the interpreter may end.

    A thread of Gloo may still hold the tensors of a finished collective, because DTensor's caches
    keep its group alive. If it releases them while the interpreter ends, the process is aborted
    ("terminate called without an active exception"). So this function waits until it has done so.
    """
    dist.destroy_process_group()
    time.sleep(_LETTING_GO_SECONDS)
