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
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.equal_ranks import all_equal


@final
class Clipping:
    """Clips the gradients of the given parameters, by name; its construction is a collective."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        first = _first_homes(parameters)
        self.parameters = list(parameters.values())
        one = self.parameters[0] if self.parameters else torch.empty(0)
        # That of the mesh, where norms are summed: parameters may be on the host.
        self.device = one.device
        if isinstance(one, DTensor) and one.device_mesh.device_type != one.device.type:
            self.device = torch.device(one.device_mesh.device_type)
        self.counted = [name in first and _is_first_holder(p) for name, p in parameters.items()]

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The Euclidean norm of all gradients together, float64 [], on every rank."""
        tiles = [
            _tile(p.grad)
            for p, counted in zip(self.parameters, self.counted, strict=True)
            if counted and p.grad is not None
        ]
        # Many tensors of a dtype take a few kernels; a norm in half precision is too coarse.
        norms = [
            get_total_norm([tile for tile in tiles if tile.dtype == dtype]).double()
            for dtype in dict.fromkeys(tile.dtype for tile in tiles)
            if dtype == _wide(dtype)
        ]
        norms += [
            torch.linalg.vector_norm(tile, dtype=_wide(tile.dtype)).double()
            for tile in tiles
            if tile.dtype != _wide(tile.dtype)
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if norms:
            total = torch.stack(norms).square().sum().to(self.device)
        if (world := dist.group.WORLD) is not None:
            backend_of(world).reduce(world, total)
        return total.sqrt()

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`; the norm they had.

        The factor is that of `torch.nn.utils.clip_grad_norm_`.
        """
        norm = self.norm()
        trained = [p for p in self.parameters if p.grad is not None]
        for dtype in dict.fromkeys(p.dtype for p in trained):
            tiles = [_with_gradient(p) for p in trained if p.dtype == dtype]
            clip_grads_with_norm_(tiles, max_norm, norm.to(_wide(dtype)))
        return norm


@torch.no_grad()
def scale(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply the gradients of `parameters`, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            _tile(parameter.grad).mul_(factor)


def _with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's tile of a parameter, with the tile of its gradient."""
    assert parameter.grad is not None, "others are left out"
    tile = _tile(parameter).detach()
    tile.grad = _tile(parameter.grad)
    return tile


def _tile(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _is_first_holder(parameter: torch.Tensor) -> bool:
    """Whether this rank is the first along every axis on which the parameter is replicated."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    at = parameter.device_mesh.get_coordinate()
    assert at is not None, "a rank holds no parameters of meshes that it is not in"
    placed = zip(parameter.placements, at, strict=True)
    return all(place == 0 for placement, place in placed if isinstance(placement, Replicate))


def _first_homes(parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of `parameters` that no mesh before this rank's holds, too, as a tied embedding."""
    mine = {
        name: int(p.device_mesh.mesh.min()) if isinstance(p, DTensor) else 0
        for name, p in parameters.items()
    }
    if not dist.is_initialized() or all_equal(mine, (dist.group.WORLD,)):
        return set(mine)  # without stages all ranks have all parameters
    homes: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(homes, mine)
    return {name for name, home in mine.items() if home == min(h.get(name, home) for h in homes)}
