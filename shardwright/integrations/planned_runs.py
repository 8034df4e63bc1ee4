"""Plans, planned modules and checkpoints, as all adapters for other trainers need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardwright import api
from shardwright.ir.plan import Plan, PlanError
from shardwright.machine.model import Machine
from shardwright.runtime.model_values import Stored
from shardwright.runtime.parallel import parallelize
from shardwright.runtime.parallel_module import ParallelModule
from shardwright.runtime.weight_files.dcp_index import CheckpointError
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.state import TrainingState
from shardwright.train.data.batches import Batches

SHARDED = "sharded"  # the folder, in a trainer's checkpoint, of what each rank wrote


def found_plan(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    machine: Machine | str | None,
    outputs: str,
    **options: Any,
) -> Plan:
    """The fastest plan on `machine` that a loop with `loss.backward()` can run; all ranks find it.

    `options` are those of `shardwright.plan`. Raises `PlanError` without a machine.
    """
    if machine is None:
        raise PlanError("give a plan, or the machine to find one for, as in machine='8xH100'")
    if outputs == "model":  # which micro-batches and losses in chunks do not return
        options = {"micro_batches": (1,), "loss_chunks": (1,), **options}
    return api.plan(model, args, kwargs, machine=machine, stages=(1,), **options)


def planned_module(
    model: nn.Module, plan: Plan, outputs: str, weights: Stored = None, seed: int = 0
) -> ParallelModule:
    """The module of `plan`; raises `PlanError` for pipelines, which have no forward pass."""
    if plan.pipeline is not None:
        raise PlanError(
            "the plan has pipeline stages, which have no forward pass for a trainer to call; plan"
            " with stages=(1,), or use pm.train_step"
        )
    module = parallelize(model, plan, outputs=outputs, batch="global", weights=weights, seed=seed)
    assert isinstance(module, ParallelModule), "it has no stages"
    return module


def save_run(
    folder: Path,
    plan: Plan,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
    step: int = 0,
) -> None:
    """Write parameters, optimizer, schedule and random states into `folder`; every rank calls it.

    Raises `CheckpointError` on every rank, if one cannot write.
    """
    Checkpoints(folder / SHARDED, plan, keep=1).save(_state(module, optimizer, schedule, step))


def resume_run(
    folder: Path,
    plan: Plan,
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    schedule: LRScheduler | None = None,
) -> None:
    """Restore what `save_run` wrote, under any plan and on any number of ranks.

    Raises `CheckpointError` where there is none, or one of another model or optimizer.
    """
    if not (folder / SHARDED).is_dir():
        raise CheckpointError(
            f"{folder} has no '{SHARDED}', in which ranks wrote parameters and optimizer; give a"
            " checkpoint that was written under a plan, with its optimizer"
        )
    run = _state(module, optimizer, schedule, 0)
    Checkpoints(folder / SHARDED, plan, keep=1).resume(run)


def _state(
    module: Any, optimizer: torch.optim.Optimizer, schedule: LRScheduler | None, step: int
) -> TrainingState:
    """The trainer's own record says which batches come next, so the stream here is empty."""
    return TrainingState(module, optimizer, Batches(()), schedule, step)


def is_first_rank() -> bool:
    """Whether this rank writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0
