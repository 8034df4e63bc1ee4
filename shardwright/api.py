"""The public functions: capture, search, plan, parallelize, verify."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from torch import nn

from shardwright.ir.constraints import Constraint
from shardwright.ir.frontier import Frontier as IrFrontier
from shardwright.ir.frontier import parse_limit
from shardwright.ir.graph import Graph
from shardwright.ir.numerics import Numerics
from shardwright.ir.optimizers import known_optimizer
from shardwright.machine.files import machine_of
from shardwright.machine.model import Machine
from shardwright.planner import planner
from shardwright.planner.arguments import check_arguments
from shardwright.planner.memory_limits import STATE, WEIGHTS, check_limit
from shardwright.planner.planner import Progress
from shardwright.planner.tables.memory import state_bytes
from shardwright.public import Frontier, Plan
from shardwright.runtime.parallel import ParallelModule, parallelize
from shardwright.runtime.verify.verify import Report, verify
from shardwright.tracing.arguments import (
    check_loss,
    require_loss,
    require_module,
    weight_bytes,
)
from shardwright.tracing.discovery.discover import capture_with_rules

P = ParamSpec("P")

__all__ = [
    "Frontier",
    "Graph",
    "Machine",
    "ParallelModule",
    "Plan",
    "Progress",
    "Report",
    "capture",
    "parallelize",
    "plan",
    "search",
    "verify",
]


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rng: str = "exact",
    batch_norm: str = "exact",
    precision: str = "model",
    loss: str = "model",
) -> Graph:
    """The serial dataflow graph of `model(*args, **kwargs)`; meta-device models are welcome.

    Nothing is computed and nothing is allocated. `rng="fast"` keeps torch's
    fused kernels for dropout and attention, whose random numbers depend on the
    plan; by default every plan draws what one device draws.
    `batch_norm="local"` takes the statistics of each device's own part of the
    batch, as DDP does; by default they are those of the whole batch. `precision="bf16"`
    computes in bfloat16 on casts of parameters that stay float32. A model that takes `labels` and
    gets none returns no loss, which is an error unless `loss="outside"` says that it is computed
    outside of it. Raises `CaptureError`, a
    `ValueError`, naming the user's file and line, for a model that no fixed
    graph can express.
    """
    check_loss(loss)
    found = capture_with_rules(model, args, kwargs, Numerics(rng, batch_norm, precision))
    if loss == "model":
        require_loss(model, args, kwargs or {}, found.output_keys)
    return found.graph


def _public(search: Callable[P, IrFrontier]) -> Callable[P, Frontier]:
    @functools.wraps(search)
    def found(*args: P.args, **kwargs: P.kwargs) -> Frontier:
        return Frontier.of(search(*args, **kwargs))

    return found


search = _public(planner.search)


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    machine: Machine | str,
    optimizer: object = "adamw",
    memory_limit: str | int | None = None,
    constraints: Sequence[str | Constraint] = (),
    micro_batches: Sequence[int] | str | None = None,
    stages: Sequence[int] | None = (1,),
    allow_async: bool = False,
    rng: str = "exact",
    batch_norm: str = "exact",
    precision: str = "model",
    loss: str = "model",
) -> Plan:
    """Capture, search and choose: the fastest plan whose peak memory per rank is within the limit.

    `optimizer` is a name, a class of torch.optim, or one that was made.
    The limit is the memory of a device unless `memory_limit` says otherwise; with "unlimited" the
    plan may exceed that, and then its notes say so.
    The step takes the batch in one of these numbers of `micro_batches`; None
    tries more than one where the limit makes plans slower or rules all out.
    Pipelines of these numbers of `stages` are among the plans, None being all powers of two;
    with `allow_async` asynchronous ones too, which change the optimisation.
    `rng`, `batch_norm`, `precision` and `loss` as in `capture`. Raises `InfeasibleError`, naming
    the smallest memory that would do, if there is none, and `ConstraintError` for `constraints`
    that mean nothing here or that no plan can meet.
    """
    optimizer, machine = known_optimizer(optimizer), machine_of(machine)
    if memory_limit is not None:
        memory_limit = parse_limit(memory_limit)
    check_arguments(
        machine, constraints, stages, micro_batches=micro_batches, allow_async=allow_async
    )
    require_module(model)
    check_limit(machine, memory_limit, weight_bytes(model), WEIGHTS)
    graph = capture(
        model, args, kwargs, rng=rng, batch_norm=batch_norm, precision=precision, loss=loss
    )
    check_limit(machine, memory_limit, state_bytes(graph, optimizer), STATE)
    frontier = search(
        graph,
        machine,
        optimizer,
        constraints=constraints,
        micro_batches=micro_batches,
        memory_limit=memory_limit,
        stages=stages,
        allow_async=allow_async,
    )
    return frontier.fastest(memory_limit)
