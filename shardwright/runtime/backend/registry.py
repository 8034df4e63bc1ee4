"""The `Backend` of a process group or of a type of device."""

from __future__ import annotations

import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.base import Backend
from shardwright.runtime.backend.gloo import Gloo

# One object each: what `tune_host` changes is the process.
_ON_DEVICE_STREAMS = Backend(BACKENDS["nccl"])
_KNOWN: dict[str, Backend] = {"nccl": _ON_DEVICE_STREAMS, "gloo": Gloo()}


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The backend of `group`, by default of all ranks; other libraries are called as NCCL is."""
    return _KNOWN.get(dist.get_backend(group), _ON_DEVICE_STREAMS)


def backend_for(device: str) -> Backend:
    """The backend for a device type, as torch names it; unknown ones are treated as GPUs."""
    return next((b for b in _KNOWN.values() if b.spec.device == device), _ON_DEVICE_STREAMS)
