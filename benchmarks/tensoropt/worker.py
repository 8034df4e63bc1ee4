"""One rank that trains under falling memory limits, enforced, and says how far it came.

The limit is on tensors: parameters, gradients, the optimizer's state, what the backward pass needs,
buffers of collectives. After a first step, which loads what Python loads late and makes the
optimizer's state, `RLIMIT_DATA`, the private memory that the kernel lets a process have, is set to
what it has besides tensors, plus the limit, plus an allowance for fragments of the heap. Unlike a
meter it stops what no hook of ours sees: workspaces, buffers of Gloo.
A cgroup would do the same, but one for each rank needs rights that a container seldom has.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from benchmarks.efficiency.strategies import data_parallel, fully_sharded
from benchmarks.record import TUNE_HOST
from shardwright.runtime.train_module import TrainModule

ALLOWANCE = 12 * 2**20  # fragments of the heap
OURS = "ours"
WRAPPERS = {"DistributedDataParallel": data_parallel, "fully_shard": fully_sharded}
Batch = dict[str, Tensor]


class Wide(nn.Module):
    """Linear layers whose weights are as large as their activations, and the loss."""

    def __init__(self, width: int = 1024, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.nn.functional.gelu(layer(inputs))
        return nn.functional.mse_loss(inputs, targets)


def made() -> tuple[nn.Module, Batch]:
    """The model and a batch of 1024, the same at each call."""
    torch.manual_seed(0)
    return Wide(), {"inputs": torch.randn(1024, 1024), "targets": torch.randn(1024, 1024)}


@dataclass(frozen=True, slots=True)
class Task:
    """Who trains, on how many ranks, under which limits in bytes, for how many steps each."""

    name: str
    ranks: int
    plan: str  # JSON; of ours alone
    limits: tuple[int, ...]  # falling
    steps: int


def told_file(folder: str | Path, rank: int) -> Path:
    """Where a rank writes a list of seconds for each limit that it came through."""
    return Path(folder) / f"rank{rank}.json"


def run(rank: int, task: Task, folder: str) -> None:
    """Train; a limit that is too low ends this process with an error."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=task.ranks,
        timeout=timedelta(seconds=120),
    )
    _train(task, told_file(folder, rank))
    dist.destroy_process_group()


def _train(task: Task, told: Path) -> None:
    model, batch = made()
    if task.name == OURS:
        parallel: Any = sw.parallelize(model, sw.Plan.from_json(task.plan), tune_host=TUNE_HOST)
        batch = {key: value.clone() for key, value in parallel.local_batch(batch).items()}
        trained: nn.Module = parallel
    else:
        trained = WRAPPERS[task.name](model)
        batch = {key: v.chunk(task.ranks)[dist.get_rank()].clone() for key, v in batch.items()}
    del model
    optimizer = torch.optim.AdamW(trained.parameters(), foreach=False)
    _step(trained, optimizer, batch)
    optimizer.zero_grad(set_to_none=True)
    held = _tensors(trained, optimizer, batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, and is not ours to use again
    rest = _data_bytes() - held
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    seconds: list[list[float]] = []
    for limit in task.limits:
        dist.barrier()
        resource.setrlimit(resource.RLIMIT_DATA, (rest + limit + ALLOWANCE, most))
        seconds.append([])
        for _ in range(task.steps):
            start = time.perf_counter()
            _step(trained, optimizer, batch)
            seconds[-1].append(time.perf_counter() - start)
        told.write_text(json.dumps(seconds))
    dist.barrier()  # none leaves while another still sends


def _step(trained: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    if isinstance(trained, TrainModule):
        trained.train_step(optimizer, batch)
        return
    optimizer.zero_grad(set_to_none=True)
    trained(**batch).backward()
    optimizer.step()


def _tensors(trained: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> int:
    """Bytes of what lasts from step to step."""
    state = [value for found in optimizer.state.values() for value in found.values()]
    lasting = (*trained.parameters(), *state, *batch.values())
    total = sum(_bytes(value) for value in lasting if isinstance(value, Tensor))
    if isinstance(trained, DistributedDataParallel):  # its buckets
        total += sum(_bytes(parameter) for parameter in trained.parameters())
    return total


def _bytes(tensor: Any) -> int:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()


def _data_bytes() -> int:
    """Private memory that the kernel counts against the limit."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData; a Linux kernel is needed")


def came_through(folder: str, ranks: Sequence[int]) -> list[list[list[float]]]:
    """Seconds by limit, rank and step, of the limits that all ranks came through."""
    files = [told_file(folder, rank) for rank in ranks]
    by_rank = [json.loads(file.read_text()) if file.exists() else [] for file in files]
    return [list(one) for one in zip(*by_rank, strict=False)]
