"""The `Backend` of a process group or of a type of device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.machine.backends import BACKENDS
from shardwright.runtime.backend.base import Backend
from shardwright.runtime.backend.gloo import Gloo

# One object each, because `tune_host` changes the process. Backends without a class run like NCCL.
_CLASSES: dict[str, Backend] = {"gloo": Gloo()}
_KNOWN = {name: _CLASSES.get(name) or Backend(spec) for name, spec in BACKENDS.items()}
_ON_DEVICE_STREAMS = _KNOWN["nccl"]


def backend_of(group: dist.ProcessGroup | None = None) -> Backend:
    """The backend of `group`, by default of all ranks; unknown backends are treated like NCCL.

    A group of several backends is that of its device other than the CPU, where this host has one.
    """
    named = _KNOWN.get(dist.get_backend(group))
    if named is not None:
        return named
    joined = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    accelerators = [
        name
        for kind, name in joined.items()
        if kind != "cpu" and torch.get_device_module(kind).is_available()
    ]
    return _KNOWN.get((accelerators or [joined.get("cpu", "")])[0], _ON_DEVICE_STREAMS)


def backend_for(device: str) -> Backend:
    """The backend for a device type, as torch names it; unknown ones are treated as GPUs."""
    return next((b for b in _KNOWN.values() if b.spec.device == device), _ON_DEVICE_STREAMS)
