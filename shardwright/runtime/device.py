"""The device that this rank computes on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.machine.backends import BACKENDS


def default_device() -> torch.device:
    """The device of this rank: the current device of its backend's type, e.g. a GPU, or the CPU."""
    named = dist.get_backend() if dist.is_initialized() else ""
    for spec in BACKENDS.values():
        if spec.device != "cpu" and spec.name in named:
            return torch.device(spec.device, torch.get_device_module(spec.device).current_device())
    return torch.device("cpu")
