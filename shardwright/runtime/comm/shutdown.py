"""Ends a rank without disturbing the others."""

from __future__ import annotations

import time

import torch.distributed as dist

_LETTING_GO_SECONDS = 0.05


def leave() -> None:
    """Leave the process group, so that the interpreter may end.

    A thread of Gloo's may still hold the tensors of a collective that is done, as DTensor's caches
    keep its group alive. If it lets go of them while the interpreter ends, the process is aborted
    ("terminate called without an active exception"): so it is given the time to do so before.
    """
    dist.destroy_process_group()
    time.sleep(_LETTING_GO_SECONDS)
