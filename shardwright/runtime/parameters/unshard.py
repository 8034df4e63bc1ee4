"""Loads parameters into the program and reduces their gradients.

Going through `DTensor.to_local` costs two nodes of the autograd graph for each
parameter. Here a bucket of them is one node, and where gradients are summed
over the mesh, so is the sum: one buffer, reduced while the backward pass goes
on. Compilers fuse on their own, so under `torch.compile` each parameter goes
its own way; so it does where the backward pass is differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwright.program.instructions import Fetch, Reduce
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.comm.process_group import begun_along
from shardwright.runtime.comm.redistribute import Redistribution
from shardwright.runtime.parameters.dtensor_spec import Placed, local

Works = list[Waited]


class Loading(nn.Module):
    """One `Fetch` instruction."""

    def __init__(self, instruction: Fetch) -> None:
        super().__init__()
        self.shapes = [part.shape for part in instruction.parts]
        self.copied = instruction.copied
        self.names = [part.leaf for part in instruction.parts]
        self._places: dict[int, Placed] = {}  # of parameters, by number

    def forward(self, *parameters: torch.Tensor) -> tuple[torch.Tensor | Works, ...]:
        """This rank's tiles in the shapes operators take them in, and an empty list of works."""
        works: Works = []
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            tiles = [local(p).view(shape) for p, shape in zip(parameters, self.shapes, strict=True)]
            return (*tiles, works)
        found: dict[int, torch.Tensor] = {}
        trained = []
        for i, (parameter, shape) in enumerate(zip(parameters, self.shapes, strict=True)):
            plain = not isinstance(parameter, DTensor)
            if plain and parameter.shape == shape:
                found[i] = parameter
            elif not parameter.requires_grad or (plain and not self.copied[i]):
                found[i] = local(parameter).view(shape)
            else:
                trained.append(i)
        if trained:
            shapes = [self.shapes[i] for i in trained]
            copied = [self.copied[i] for i in trained]
            given = [parameters[i] for i in trained]
            places = [self._place(i, parameters[i]) for i in trained]
            tiles = _Load.apply(works, shapes, copied, places, *given)  # type: ignore[no-untyped-call]
            found.update(zip(trained, tiles, strict=True))
        return (*(found[i] for i in range(len(parameters))), works)

    def _place(self, number: int, parameter: torch.Tensor) -> Placed | None:
        """Where a parameter lies, found out once; None where it is no DTensor."""
        if not isinstance(parameter, DTensor):
            return None
        known = self._places.get(number)
        if known is None or not known.suits(parameter):
            known = self._places[number] = Placed(parameter)
        return known

    def extra_repr(self) -> str:
        return ", ".join(self.names)


class _Load(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        works: Works,
        shapes: list[tuple[int, ...]],
        copied: list[bool],
        places: list[Placed | None],
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.works, ctx.copied = works, copied
        tiles = [local(p) for p in parameters]
        ctx.stored = [(tile.shape, place) for tile, place in zip(tiles, places, strict=True)]
        return tuple(tile.view(shape) for tile, shape in zip(tiles, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        while ctx.works:
            wait_for(ctx.works.pop(), "sums of gradients")
        found: list[torch.Tensor | None] = []
        for grad, copied, stored in zip(grads, ctx.copied, ctx.stored, strict=True):
            if grad is None:
                found.append(None)
                continue
            local, placed = stored
            # `.grad` takes it as its own, so it must be no other value's gradient.
            tile = grad.reshape(local).contiguous()
            if copied and tile.data_ptr() == grad.data_ptr():
                tile = tile.clone()
            found.append(tile if placed is None else placed.whole(tile))
        return (None, None, None, None, *found)


class Reduction(nn.Module):
    """One `Reduce` instruction on a device mesh, given axis by axis."""

    def __init__(self, instruction: Reduce, axes: Mapping[str, DeviceMesh]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Redistribution(part, axes) for part in instruction.parts)
        self.axes = tuple(axes[axis] for axis in instruction.axes)
        self.copied = instruction.copied
        self.riders: list[torch.Tensor] = []  # single numbers to sum along with gradients

    def forward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """The tiles as they are."""
        *tiles, works = given
        if torch.compiler.is_compiling():
            return tuple(part(tile) for part, tile in zip(self.parts, tiles, strict=True))
        if not torch.is_grad_enabled():
            return tuple(tiles)
        summed: tuple[torch.Tensor, ...] = _Sum.apply(self, works, *tiles)  # type: ignore[no-untyped-call]
        return summed


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: Reduction, works: Works, *tiles: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.how, ctx.works = how, works
        return tuple(tile.view_as(tile) for tile in tiles)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            parts = zip(ctx.how.parts, grads, strict=True)
            return (None, None, *(None if g is None else part.sent_back(g) for part, g in parts))
        found: list[torch.Tensor | None] = list(grads)
        by_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}
        for i, grad in enumerate(grads):
            if grad is not None:
                by_dtype.setdefault(grad.dtype, {})[i] = grad
        for dtype, given in by_dtype.items():
            # A gradient that is alone is summed where it is, with no room for others.
            riders = _taken(ctx.how.riders, dtype) if len(given) > 1 else []
            summed = [*given.values(), *riders]
            buffer = _buffer(summed, ctx.how.copied[min(given)])
            work = begun_along(ctx.how.axes, buffer)
            tiles = buffer.flatten().split([one.numel() for one in summed])
            for i, grad, tile in zip(given, given.values(), tiles, strict=False):
                found[i] = tile.view(grad.shape)
            arrived = zip(riders, tiles[len(given) :], strict=True)
            ctx.works.append(_WithRiders(work, list(arrived)) if riders else work)
        return (None, None, *found)


def _taken(riders: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Those of that dtype, which are gone from `riders` then."""
    found = [rider for rider in riders if rider.dtype == dtype]
    riders[:] = [rider for rider in riders if rider.dtype != dtype]
    return found


class _WithRiders:
    """A sum of gradients in which numbers ride along; pairs of a number and its place in it."""

    def __init__(self, work: Waited, riders: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.work, self.riders = work, riders

    def wait(self) -> None:
        """Until it is done; then the numbers are sums too."""
        self.work.wait()
        for rider, place in self.riders:
            rider.copy_(place.view(rider.shape))


def _buffer(gradients: Sequence[torch.Tensor], copied: bool) -> torch.Tensor:
    """Gradients in one buffer to sum in: one that is alone and nobody else's is that itself."""
    if len(gradients) == 1:
        whole = gradients[0].contiguous()
        return whole.clone() if copied and whole.data_ptr() == gradients[0].data_ptr() else whole
    if all(gradient.is_contiguous() for gradient in gradients):
        return torch.cat([gradient.flatten() for gradient in gradients])
    # Products of compiled pieces come transposed: flattened they would be copied twice.
    buffer = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    places = buffer.split([gradient.numel() for gradient in gradients])
    for place, gradient in zip(places, gradients, strict=True):
        place.view(gradient.shape).copy_(gradient)
    return buffer
