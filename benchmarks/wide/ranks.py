"""Local processes that each run a function of one of the benchmarks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def on_ranks(devices: int, function: Callable[..., Any], *given: Any) -> Any:
    """What `function(*given)` returned on rank 0 of so many processes, through JSON."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (devices, folder, function, given), nprocs=devices)
        return json.loads((Path(folder) / "result").read_text())


def _rank(
    rank: int, devices: int, folder: str, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=devices)
    try:
        found = function(*given)
        if rank == 0:
            (Path(folder) / "result").write_text(json.dumps(found))
        dist.barrier()  # none leaves while another still sends
    finally:
        dist.destroy_process_group()
