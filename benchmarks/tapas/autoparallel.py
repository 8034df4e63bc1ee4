"""Plan with meta-pytorch/autoparallel, where it is installed, in a process of its own.

    python -m benchmarks.tapas.autoparallel 4 1024

Prints one JSON object: processor seconds, its solver's included, to capture the joint graph of a
Llama of so many layers and so wide, and to find a placement on 8 x 8 devices. It plans for a
process group, here torch's fake one, and captures and searches at once, for one memory limit.
Follows its own `examples/example_hf.py`; repeated layers are solved once, as it does by default.
It prices operators by the name of the GPU it runs on; where there is none it is told an H100's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from benchmarks.tapas.llama import BATCH, LENGTH, VOCABULARY, llama

SIZES, NAMES = (8, 8), ("dp", "tp")
ATTENTION = "eager"  # written out: it has no strategy for the CPU's attention with a mask


class _Loss(nn.Module):
    """A Llama that returns its loss alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.network(input_ids=ids, labels=ids).loss
        return loss


def installed() -> bool:
    """Whether it can be asked."""
    return find_spec("autoparallel") is not None


def asked(layers: int, width: int, limit_seconds: float) -> dict[str, Any]:
    """What it says in a process of its own, or why it said nothing."""
    command = [sys.executable, "-m", __name__, str(layers), str(width)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no plan in {limit_seconds:g} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Plan, print."""
    from autoparallel.api import AutoParallel  # type: ignore[import-not-found]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("layers", type=int)
    parser.add_argument("width", type=int)
    options = parser.parse_args()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=0, world_size=64)
    device = "cuda" if torch.cuda.is_available() else "cpu"  # planning needs none of either
    mesh = init_device_mesh(device, SIZES, mesh_dim_names=NAMES)
    with torch.device("meta"):
        model = _Loss(llama(options.layers, options.width, ATTENTION))
    start = _seconds()

    def ids() -> Tensor:
        return torch.randint(VOCABULARY, (BATCH, LENGTH), device=device)

    named = mock.patch.object(
        torch.get_device_module(device), "get_device_name", _h100, create=True
    )
    with named, AutoParallel(model, ids, mesh) as planner:
        planner.add_input_constraints([(Shard(0), Replicate())])
        planner.add_parameter_memory_constraint(low=None, high=None)
        captured = _seconds()
        planner.optimize_placement(verbose=False)
        planned = _seconds()
    print(json.dumps({"capture_seconds": captured - start, "search_seconds": planned - captured}))


def _h100(device: object = None) -> str:
    return "NVIDIA H100"


def _seconds() -> float:
    """Processor seconds of this process and of those it has started."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
