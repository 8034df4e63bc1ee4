"""The placement of a DTensor, to create others with the same placement."""

from __future__ import annotations

from typing import cast, final

import torch
from torch.distributed.tensor import DTensor


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's tile of a parameter; a plain tensor is its own."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


@final
class DTensorSpec:
    """Where `like` lies, without the tensor."""

    def __init__(self, like: DTensor) -> None:
        self.mesh, self.placements = like.device_mesh, like.placements
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype
        like = cast(DTensor, like.detach())  # a gradient is not differentiated
        names, self._context = like.__tensor_flatten__()
        inner = {name: getattr(like, name) for name in names}
        self.local_shape = like.to_local().shape
        (self._tile,) = (name for name in names if isinstance(inner[name], torch.Tensor))
        self._others = {name: value for name, value in inner.items() if name != self._tile}

    def suits(self, other: DTensor) -> bool:
        """Whether `other` lies there too."""
        return (
            self.shape == other.shape
            and self.dtype == other.dtype
            and self.placements == other.placements
            and self.mesh is other.device_mesh
        )

    def whole(self, tile: torch.Tensor) -> DTensor:
        """The tensor of which `tile` is what this rank has.

        Where nothing is differentiated it is put together as compilers put together a tensor that
        consists of others; `from_local` makes a node of the autograd graph first, and takes three
        times as long.
        """
        if torch.is_grad_enabled():
            return DTensor.from_local(
                tile,
                self.mesh,
                self.placements,
                run_check=False,
                shape=self.shape,
                stride=self.stride,
            )
        found: DTensor = DTensor.__tensor_unflatten__(
            {self._tile: tile, **self._others}, self._context, self.shape, self.stride
        )
        return found
