"""The device that this rank computes on."""

from __future__ import annotations

import torch
import torch.distributed as dist


def default_device() -> torch.device:
    """The device of this rank: its GPU under NCCL, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
