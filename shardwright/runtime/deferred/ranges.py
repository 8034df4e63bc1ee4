"""Tiles of a tensor as ranges of its dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.ir.layout import Atoms, Layout, local_atoms, shape_of
from shardwright.program.instructions import flat
from shardwright.runtime.batch import cut

Ranges = tuple[tuple[int, int], ...]  # (start, stop) along each dimension


def whole_of(shape: Sequence[int]) -> Ranges:
    """The ranges of all elements."""
    return tuple((0, size) for size in shape)


def ranges_of(
    shape: Sequence[int], atoms: Atoms, layout: Layout, coordinate: tuple[int, ...]
) -> Ranges:
    """The ranges of the tile at `coordinate`; parameters are stored so that a tile has such."""
    whole = torch.empty(tuple(shape), device="meta")
    tile = cut(whole.reshape(flat(atoms)), atoms, layout, coordinate)
    sizes = shape_of(local_atoms(atoms, layout, coordinate))
    offset, found = int(tile.storage_offset()), []
    for stride, size in zip(whole.stride(), sizes, strict=True):
        start, offset = divmod(offset, stride) if stride else (0, offset)
        found.append((start, start + size))
    return tuple(found)


def narrowed(tensor: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """The elements of `tensor` within `ranges`; a view."""
    for dim, (start, stop) in enumerate(ranges):
        if (start, stop) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
