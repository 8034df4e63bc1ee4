"""Gradient norm over all meshes and layouts of a run, and clipping by it.

`torch.nn.utils.clip_grad_norm_` stacks the norms of DTensors, which must be on one mesh, and
ignores parameters on other ranks, e.g. of other pipeline stages. Here each rank adds up the squares
of the elements of which it is the first holder, and one all-reduce sums them over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate


@final
class Clipping:
    """Clips the gradients of the given parameters, by name; its construction is a collective."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        first = _first_homes(parameters)
        self.parameters = list(parameters.values())
        self.counted = [name in first and _is_first_holder(p) for name, p in parameters.items()]

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients together, float64 [], on every rank."""
        squares = [
            torch.linalg.vector_norm(_tile(p.grad), dtype=_wide(p.grad)).double().square()
            for p, counted in zip(self.parameters, self.counted, strict=True)
            if counted and p.grad is not None
        ]
        device = _tile(self.parameters[0]).device if self.parameters else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        total = torch.stack([total, *squares]).sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; the norm they had.

        The factor is that of `torch.nn.utils.clip_grad_norm_`.
        """
        norm = self.norm()
        scale(self.parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


@torch.no_grad()
def scale(parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `parameters`, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            tile = _tile(parameter.grad)
            tile.mul_(factor.to(tile.dtype) if isinstance(factor, torch.Tensor) else factor)


def _tile(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wide(gradient: torch.Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)


def _is_first_holder(parameter: torch.Tensor) -> bool:
    """Whether this rank is the first along every axis on which the parameter is replicated."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    at = parameter.device_mesh.get_coordinate()
    assert at is not None, "a rank holds no parameters of meshes that it is not in"
    placed = zip(parameter.placements, at, strict=True)
    return all(place == 0 for placement, place in placed if isinstance(placement, Replicate))


def _first_homes(parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Those of `parameters` that no mesh before this rank's holds too, as a tied embedding."""
    mine = {
        name: int(p.device_mesh.mesh.min()) if isinstance(p, DTensor) else 0
        for name, p in parameters.items()
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return set(mine)
    homes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(homes, mine)
    return {name for name, home in mine.items() if home == min(h.get(name, home) for h in homes)}
