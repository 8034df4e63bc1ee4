"""The public `Machine`, with `measure`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from shardwright.machine import model
from shardwright.profile.measure import measure_host, measure_ranks


@dataclass(frozen=True, slots=True)
class Machine(model.Machine):
    """The hardware a plan is made for; see `shardwright.machine.model.Machine`."""

    @classmethod
    def preset(cls, text: str) -> Machine:
        """Known hardware by `[HOSTSx]DEVICESxKIND`, as `8xH100`, `2x8xA100` or `2xcpu`."""
        return cls._of(model.Machine.preset(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """A machine file in TOML, as `to_toml` writes it."""
        return cls._of(model.Machine.load(path))

    @classmethod
    def measure(cls, devices: int | None = None) -> Machine:
        """What the devices at hand reach, measured.

        Under torchrun every rank calls it, and the ranks of the process group
        are measured together. Without one, `devices` processes are started on
        this host (by default one per GPU, or per core where there is none);
        that result is kept in a cache of this host.
        """
        if dist.is_initialized():
            return cls._of(measure_ranks())
        here = torch.cuda.device_count() or len(os.sched_getaffinity(0))
        return cls._of(measure_host(here if devices is None else devices))

    @classmethod
    def _of(cls, found: model.Machine) -> Machine:
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})
