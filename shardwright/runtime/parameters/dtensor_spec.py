"""The placement of a DTensor, to create others with the same placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's tile of a parameter; a plain tensor is its own."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def tiles(leaves: Iterable[torch.Tensor], one: torch.Tensor) -> Iterator[torch.Tensor]:
    """This rank's tiles on the device of `one`, which parameters on the host are copied to."""
    return (local(leaf).to(one.device) for leaf in leaves)


def placed_like(tile: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor of this rank's `tile`, in the layout of `like` on its mesh; plain if that is."""
    if not isinstance(like, DTensor):
        return tile
    if tile.device.type != like.device_mesh.device_type:  # on the host, as `like`
        made = torch.empty_like(like, dtype=tile.dtype, requires_grad=False)
        local(made).copy_(tile)
        return made
    return _of_tile(tile, like.device_mesh, like.placements, like.shape, like.stride())


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
    """The whole of a DTensor as a plain tensor; None for a plain one, which stays as it is.

    The gradient of an output that was added to a DTensor, as a penalty on weights, is a DTensor.
    """
    return gradient.full_tensor() if isinstance(gradient, DTensor) else None


def check_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Raise `RuntimeError` if an existing gradient has another layout than its parameter.

    In the addition of a new gradient DTensor would silently gather both on all ranks.
    """
    for parameter in parameters:
        if not isinstance(parameter, DTensor) or not parameter.is_leaf:
            continue
        known = parameter.grad
        if known is None or (
            isinstance(known, DTensor) and known.placements == parameter.placements
        ):
            continue
        placed = known.placements if isinstance(known, DTensor) else "on this rank alone"
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is placed {placed} and"
            f" the parameter {parameter.placements}; gradients are added where their parameter"
            " lies: set grad to None, or to grad.redistribute(placements=parameter.placements)"
        )


@final
class DTensorSpec:
    """Mesh, placements, shape and dtype of the DTensor `like`, without its data."""

    def __init__(self, like: DTensor) -> None:
        self.mesh, self.placements = like.device_mesh, like.placements
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype
        # Private: torch offers no other way to make a DTensor without a new specification of it.
        self._spec = like._spec
        self.local_shape = like._local_tensor.shape

    def suits(self, other: DTensor) -> bool:
        """Whether `other` has the same mesh, placements, shape and dtype."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.placements == other.placements
            and self.mesh is other.device_mesh
        )

    def whole(self, tile: torch.Tensor) -> DTensor:
        """The DTensor of which this rank has the local `tile`.

        Where nothing is differentiated it shares the specification of `like`; `from_local` makes a
        node of the autograd graph first and a new specification, and takes five times as long.
        """
        if torch.is_grad_enabled():
            return _of_tile(tile, self.mesh, self.placements, self.shape, self.stride)
        return DTensor(tile, self._spec, requires_grad=False)


def _of_tile(
    tile: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """The DTensor of this rank's `tile`, whose whole has this shape and stride."""
    return DTensor.from_local(tile, mesh, placements, run_check=False, shape=shape, stride=stride)
