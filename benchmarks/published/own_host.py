"""What a host needs to issue one kernel of our own program, from steps measured on a GPU.

`python -m scripts.gpu_check` times small models with and without a CUDA graph, which needs no host:
these steps take ten times less with one, so that without it the host decides.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import torch

import shardwright as sw
from scripts.gpu_check.models import made
from shardwright.ir.layout import Seconds

MEASURED = Path(__file__).parents[1] / "gpu" / "h200.json"
MACHINE = "1xH200"
_STEP = 1e-6  # by which the time of a kernel is changed to count kernels
_HIGH = 1e-4  # seconds of a kernel with which the host decides alone


def own_host() -> float:
    """Seconds of a host to issue a kernel: the geometric mean over the measured models."""
    times = json.loads(MEASURED.read_text())["checks"]["graphs"]["result"]
    return geometric_mean(one["plain_ms"] / 1e3 / _kernels(name) for name, one in times.items())


def _kernels(name: str) -> float:
    """The kernels of a forward and a backward pass, as they are priced."""
    model, batch = made(name, torch.device("cpu"), torch.float32)
    graph, machine = sw.capture(model, (), batch), sw.Machine.preset(MACHINE)
    slow, slower = (
        sw.price(
            graph,
            replace(machine, device=replace(machine.device, issue_seconds=Seconds(seconds))),
            "mb=1",
            "adamw",
        ).step_seconds
        for seconds in (_HIGH, _HIGH + _STEP)
    )
    return (slower - slow) / _STEP
