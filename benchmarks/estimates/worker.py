"""One of the ranks that take the steps: all plans of a model in turn, so that noise hits all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import shardwright as sw
from benchmarks.estimates.models import MODELS
from shardwright.runtime.meter import metered, tensors_of


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan as one rank ran it: seconds of each step, bytes of tensors in one of them."""

    seconds: tuple[float, ...]
    bytes: int


def run(rank: int, ranks: int, store: str, model: str, plans: list[str], rounds: int) -> None:
    """Take `rounds` steps of each plan, in turn; rank 0 writes what was measured beside `store`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        measured = [None] * ranks
        dist.all_gather_object(measured, _measured(model, plans, rounds))
        if rank == 0:
            torch.save(measured, f"{store}.measured")
    finally:
        dist.destroy_process_group()


def _measured(name: str, plans: list[str], rounds: int) -> list[Measured]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    subjects = []
    for text in plans:
        module = sw.parallelize(model, sw.Plan.from_json(text))
        optimizer = torch.optim.AdamW(module.parameters())
        module.train_step(optimizer, batch)  # makes the optimizer's state
        subjects.append((module, optimizer))
    held = [_metered(*subject, batch) for subject in subjects]
    seconds: list[list[float]] = [[] for _ in subjects]
    for _ in range(rounds):
        for place, (module, optimizer) in enumerate(subjects):
            dist.barrier()
            start = time.perf_counter()
            module.train_step(optimizer, batch).item()
            seconds[place].append(time.perf_counter() - start)
    return [Measured(tuple(s), b) for s, b in zip(seconds, held, strict=True)]


def _metered(module: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> int:
    optimizer.zero_grad(set_to_none=True)
    given = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    held = [*module.parameters(), *module.buffers(), *tensors_of(optimizer), *given]
    return metered(lambda: module.train_step(optimizer, batch), held, torch.device("cpu"))[1]
