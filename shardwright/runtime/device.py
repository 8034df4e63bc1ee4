"""The device that this rank computes on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which operators on this kind of device are cast now, None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """A context in which nothing is cast; a captured graph has its casts as operators."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    off: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return off
