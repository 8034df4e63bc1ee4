"""The `Backend` of a process group or of a type of device."""

from __future__ import annotations

import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.base import Backend
from shardwright.runtime.backend.gloo import Gloo

# One object each, because `tune_host` changes the process. Backends without a class run like NCCL.
_CLASSES: dict[str, Backend] = {"gloo": Gloo()}
_KNOWN = {name: _CLASSES.get(name) or Backend(spec) for name, spec in BACKENDS.items()}
_ON_DEVICE_STREAMS = _KNOWN["nccl"]


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The backend of `group`, by default of all ranks; unknown backends are treated like NCCL."""
    return _KNOWN.get(dist.get_backend(group), _ON_DEVICE_STREAMS)


def backend_for(device: str) -> Backend:
    """The backend for a device type, as torch names it; unknown ones are treated as GPUs."""
    return next((b for b in _KNOWN.values() if b.spec.device == device), _ON_DEVICE_STREAMS)
