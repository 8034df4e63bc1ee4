"""Flat buffers of the tiles of several tensors, in which collectives move them.

A buffer has one row per rank: the tiles of the tensors one after another, each padded to the size
of the largest rank's tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch


@dataclass(frozen=True)
class TileSplit:
    """Tiles along dimension `dim` of a tensor of shape `whole`, one for each of `ranks`.

    The dimension is cut as by `torch.chunk`, so that the last tiles may be shorter or empty.
    """

    whole: tuple[int, ...]
    dim: int
    ranks: int

    @cached_property
    def longest(self) -> int:
        """Length of the largest tile along the dimension."""
        return -(-self.whole[self.dim] // self.ranks)

    @cached_property
    def inner(self) -> int:
        """Elements of the whole for each index along the dimension."""
        return prod(self.whole) // max(1, self.whole[self.dim])

    @cached_property
    def room(self) -> int:
        """Elements of the largest tile."""
        return self.longest * self.inner

    @cached_property
    def even(self) -> bool:
        """Whether all ranks' tiles are equally large."""
        return self.whole[self.dim] % self.ranks == 0

    @cached_property
    def leads(self) -> bool:
        """Whether the tiles, one after the other, are the whole, followed by their padding."""
        return prod(self.whole[: self.dim]) == 1

    @cached_property
    def in_order(self) -> bool:
        """Whether the tiles, one after the other, are the whole, without padding."""
        return self.even and self.leads

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's tile."""
        size = min(self.longest, max(0, self.whole[self.dim] - rank * self.longest))
        return (*self.whole[: self.dim], size, *self.whole[self.dim + 1 :])

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole, contiguous, of the ranks' tiles with their padding, a row each."""
        if self.in_order:
            return rows.contiguous().view(self.whole)
        if self.leads and rows.is_contiguous():
            return rows.view(-1)[: prod(self.whole)].view(self.whole)
        if self.even:
            # Contiguous first, and so in memory of its own: as views tiles of length 1 would do.
            return rows.view(self._by_rank).movedim(0, self.dim).contiguous().view(self.whole)
        tiles = [self._tile(row, rank) for rank, row in enumerate(rows)]
        return torch.cat(tiles, self.dim)

    def split_into(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the tiles of `whole` into a row for each rank, and zeros into the padding."""
        if self.in_order and whole.is_contiguous():
            rows.copy_(whole.view(self.ranks, self.room))
        elif self.even:
            tiles = whole.reshape(self._ranks_inside).movedim(self.dim, 0)
            rows.view(self._by_rank).copy_(tiles)
        else:
            for rank, row in enumerate(rows):
                shape = self.shape(rank)
                start = min(rank * self.longest, self.whole[self.dim])
                self._tile(row, rank).copy_(whole.narrow(self.dim, start, shape[self.dim]))
                row[prod(shape) :].zero_()

    def _tile(self, row: torch.Tensor, rank: int) -> torch.Tensor:
        shape = self.shape(rank)
        return row[: prod(shape)].view(shape)

    @cached_property
    def _by_rank(self) -> tuple[int, ...]:
        before, after = self.whole[: self.dim], self.whole[self.dim + 1 :]
        return (self.ranks, *before, self.longest, *after)

    @cached_property
    def _ranks_inside(self) -> tuple[int, ...]:
        before, after = self.whole[: self.dim], self.whole[self.dim + 1 :]
        return (*before, self.ranks, self.longest, *after)


def gather_buffer(
    tiles: Sequence[TileSplit], given: Sequence[torch.Tensor], rank: int
) -> torch.Tensor:
    """A buffer for an all-gather in which this rank's tiles are at their final positions."""
    rooms, ranks = [tile.room for tile in tiles], tiles[0].ranks
    buffer = given[0].new_empty(sum(rooms) * ranks)
    own = buffer.view(ranks, -1)[rank]
    if sum(x.numel() for x in given) == own.numel():
        torch.cat([x.reshape(-1) for x in given], out=own)
        return buffer
    for x, place in zip(given, own.split(rooms), strict=True):
        place[x.numel() :].zero_()
        place[: x.numel()].view(x.shape).copy_(x)
    return buffer


def gathered(tiles: Sequence[TileSplit], buffer: torch.Tensor) -> list[torch.Tensor]:
    """The whole tensors, from a buffer in which the tiles of all ranks have arrived."""
    rows = buffer.view(tiles[0].ranks, -1).split([tile.room for tile in tiles], dim=1)
    return [tile.joined(row) for tile, row in zip(tiles, rows, strict=True)]


def scatter_buffer(tiles: Sequence[TileSplit], given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A buffer with all ranks' tiles of whole tensors, rank by rank."""
    rooms, ranks = [tile.room for tile in tiles], tiles[0].ranks
    buffer = given[0].new_empty(sum(rooms) * ranks)
    if all(tile.in_order for tile in tiles):
        rows = [x.reshape(ranks, tile.room) for tile, x in zip(tiles, given, strict=True)]
        torch.cat(rows, dim=1, out=buffer.view(ranks, -1))
        return buffer
    places = buffer.view(ranks, -1).split(rooms, dim=1)
    for tile, x, place in zip(tiles, given, places, strict=True):
        tile.split_into(x, place)
    return buffer
