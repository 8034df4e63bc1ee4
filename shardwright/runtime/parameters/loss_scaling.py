"""Scaled losses: float16 gradients that would underflow are computed of a multiple of the loss.

`torch.amp.GradScaler` chooses the multiple. It skips an update whose gradients are not finite, on
the ranks of each gradient's mesh; `spread_overflow` makes all ranks skip it, also those of other
pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.utils import get_total_norm

from shardwright.ir.graph import Graph
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.plan import PlanError
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.parameters.dtensor_spec import local

_HALF = "float16"


def computes_in_float16(graph: Graph) -> bool:
    """Whether gradients of operators have the narrow range of float16."""
    return any(tensor.dtype == _HALF for tensor in graph.tensor.values())


def scaler_of(numerics: Numerics, device: torch.device) -> GradScaler | None:
    """A scaler with torch's defaults for parameters kept in float32; None if none is needed."""
    return GradScaler(device.type) if numerics.precision == "fp16" else None


def scale_of(scaler: GradScaler, device: torch.device) -> torch.Tensor:
    """The multiple by which the loss is scaled now, float32 [], on `device`."""
    found = scaler.scale(torch.ones((), device=device))
    assert isinstance(found, torch.Tensor), "as it was given"
    return found


class Seeded(Protocol):
    """Runs steps whose backward pass begins with the gradient `scale` of the loss."""

    scale: torch.Tensor | None


@contextmanager
def scaled(program: Seeded, scaler: GradScaler | None, device: torch.device) -> Iterator[None]:
    """A context in which the steps of `program` begin with the scale of `scaler`, if there is one.

    The scale is known before the step because its gradients are computed in its forward call.
    """
    program.scale = None if scaler is None else scale_of(scaler, device)
    try:
        yield
    finally:
        program.scale = None


def unscale(optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
    """Divide gradients by the scale; a collective.

    Raises `PlanError` on a pipeline stage without gradients, which knows no update to skip.
    """
    every = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in every):
        raise PlanError(
            "this rank has no gradients, so it cannot take part in scaling the loss; plan with"
            " precision='bf16', or with other stages"
        )
    spread_overflow(every)
    scaler.unscale_(optimizer)


@torch.no_grad()
def spread_overflow(parameters: Iterable[torch.Tensor]) -> None:
    """Make a gradient not finite on every rank if one is not finite on any; a collective.

    The host does not wait for the device.
    """
    tiles = [local(p.grad) for p in parameters if p.grad is not None]
    world = dist.group.WORLD
    if not tiles or world is None or world.size() == 1:
        return
    bad = torch.zeros((), device=tiles[0].device)
    tiles = [tile for tile in tiles if tile.numel()]
    for dtype in dict.fromkeys(tile.dtype for tile in tiles):
        # The largest element: sums of finite elements may overflow.
        norm = get_total_norm([t for t in tiles if t.dtype == dtype], norm_type=float("inf"))
        bad = torch.maximum(bad, (~norm.isfinite()).to(bad))
    backend_of(world).reduce(world, bad, dist.ReduceOp.MAX)
    if tiles:  # others of the mesh have elements, and tell this rank
        tiles[0].masked_fill_(bad.bool(), float("nan"))


@final
@dataclass(frozen=True, slots=True)
class ScaledOptimizer:
    """The update of a step whose loss was scaled: unscale, skip or step, choose the next scale."""

    optimizer: torch.optim.Optimizer
    scaler: GradScaler

    def step(self) -> None:
        """Update on all ranks, or on none."""
        unscale(self.optimizer, self.scaler)
        self.scaler.step(self.optimizer)
        self.scaler.update()
