"""Asynchronous collectives on buckets of tensors.

A bucket is one flat buffer. For an all-gather or a reduce-scatter it has one row per rank: the
parts of the bucket one after another, each padded to the size of the largest rank's tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from shardwright.ir.redistribution import MOVING, ByKind, Collective
from shardwright.program.step.instructions import Transfer
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.executor.layout_moves import moved_locally


class InFlight(Protocol):
    """A transfer that was started."""

    def results(self) -> list[torch.Tensor]:
        """Wait until it is done; the results of its parts, in order, shaped as they are."""


@dataclass(frozen=True)
class TileSplit:
    """Tiles along dimension `dim` of a tensor of shape `whole`, one for each of `ranks`."""

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
    def in_order(self) -> bool:
        """Whether the tiles, one after the other, are the whole."""
        return self.even and prod(self.whole[: self.dim]) == 1

    def shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's tile."""
        size = min(self.longest, max(0, self.whole[self.dim] - rank * self.longest))
        return (*self.whole[: self.dim], size, *self.whole[self.dim + 1 :])

    def joined(self, rows: torch.Tensor) -> torch.Tensor:
        """The whole, contiguous, of the ranks' tiles with their padding, a row each."""
        if self.in_order:
            return rows.contiguous().view(self.whole)
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


class Collectives:
    """Starts one transfer on the devices along its channel's axis, once per step or more often."""

    def __init__(self, transfer: Transfer, group: dist.ProcessGroup, rank: int) -> None:
        self.transfer, self.text = transfer, str(transfer)
        self.group, self.rank, self.ranks = group, rank, group.size()
        self.backend = backend_of(group)
        self.dtypes: list[torch.dtype] = [getattr(torch, part.dtype) for part in transfer.parts]
        self.wires = [self.backend.wire_dtype(dtype) for dtype in self.dtypes]
        self.tiles: list[TileSplit] = []
        if tiled := transfer.collective.tiled:
            dims = (p.move.src if tiled == "src" else p.move.dst for p in transfer.parts)
            self.tiles = [
                TileSplit(part.move.whole, dim, self.ranks)
                for part, dim in zip(transfer.parts, dims, strict=True)
            ]
        self.rooms = [tile.room for tile in self.tiles]
        self._start = TRANSFERS[transfer.collective]

    @property
    def writes_into(self) -> bool:
        """Whether the result may overwrite the operand, if nothing else reads that."""
        alone = len(self.transfer.parts) == 1 and all(tile.in_order for tile in self.tiles)
        return alone and self.transfer.collective.overwrites

    def start(self, values: Sequence[torch.Tensor], owned: Sequence[bool]) -> InFlight:
        """Begin the transfer of `values`, without autograd; nothing else reads those `owned`."""
        given, mine = [], []
        for part, x, dtype, wire, own in zip(
            self.transfer.parts, values, self.dtypes, self.wires, owned, strict=True
        ):
            y = x if x.dtype is dtype else x.to(dtype)
            if y.shape != part.atoms:
                y = y.reshape(part.atoms)
            if part.local:
                y = moved_locally(y, part.local)
            copied = y is not x and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
            mine.append(own or copied)
            given.append(y if dtype is wire else y.to(wire))
        return self._start(self, given, mine)

    def all_reduce(self, given: list[torch.Tensor], owned: list[bool]) -> InFlight:
        if len(given) == 1:
            (x,) = given
            if not owned[0] or not x.is_contiguous():
                x = x.clone(memory_format=torch.contiguous_format)
            return self.arriving(self._begin_sum(x), lambda: [x])
        buffer = torch.cat([x.reshape(-1) for x in given])
        shapes = [x.shape for x in given]

        def split() -> list[torch.Tensor]:
            tiles = buffer.split([prod(shape) for shape in shapes])
            return [tile.view(shape) for tile, shape in zip(tiles, shapes, strict=True)]

        return self.arriving(self._begin_sum(buffer), split)

    def _begin_sum(self, x: torch.Tensor) -> Waited:
        return self.backend.begin_reduce(self.group, x, dist.ReduceOp.SUM)

    def all_gather(self, given: list[torch.Tensor], _owned: list[bool]) -> InFlight:
        buffer = gather_buffer(self.tiles, given, self.rank)
        work = self.backend.begin_gather(self.group, buffer, self.rank)
        return self.arriving(work, lambda: gathered(self.tiles, buffer))

    def reduce_scatter(self, given: list[torch.Tensor], owned: list[bool]) -> InFlight:
        if self.writes_into and given[0].is_contiguous() and owned[0]:
            buffer = given[0].view(-1)
        else:
            buffer = scatter_buffer(self.tiles, given)
        own = buffer.new_empty(sum(self.rooms))
        work = self.backend.begin_reduce_scatter(self.group, own, buffer, self.rank)

        def scattered() -> list[torch.Tensor]:
            shapes = [tile.shape(self.rank) for tile in self.tiles]
            chunks = own.split(self.rooms)
            return [x[: prod(shape)].view(shape) for x, shape in zip(chunks, shapes, strict=True)]

        return self.arriving(work, scattered)

    def all_to_all(self, given: list[torch.Tensor], _owned: list[bool]) -> InFlight:
        (x,), (part,) = given, self.transfer.parts
        move = part.move
        leave = TileSplit(move.whole, move.dst, self.ranks)
        come = TileSplit(_with(move.whole, move.dst, move.length), move.src, self.ranks)
        lengths = [leave.shape(rank)[move.dst] for rank in range(self.ranks)]
        chunks = x.split(lengths, move.dst)
        sent = [chunk.numel() for chunk in chunks]
        message = x.new_empty(x.numel())
        for room, chunk in zip(message.split(sent), chunks, strict=True):
            room.view(chunk.shape).copy_(chunk)
        shapes = [come.shape(rank) for rank in range(self.ranks)]
        sizes = [prod(shape) for shape in shapes]
        found = x.new_empty(sum(sizes))
        work = self.backend.begin_exchange(self.group, found, message, sizes, sent)

        def joined() -> list[torch.Tensor]:
            if prod(shapes[0][: move.src]) == 1:
                return [found.view(come.whole)]
            tiles = zip(found.split(sizes), shapes, strict=True)
            return [torch.cat([tile.view(shape) for tile, shape in tiles], move.src)]

        return self.arriving(work, joined, keep=message)

    def arriving(
        self,
        work: Waited,
        results: Callable[[], list[torch.Tensor]],
        keep: torch.Tensor | None = None,
    ) -> InFlight:
        return _InFlight(work, self, results, keep)


# Each function starts a transfer; the flags mark tensors whose memory it may overwrite.
TRANSFERS = ByKind[Callable[[Collectives, list[torch.Tensor], list[bool]], InFlight]](
    "that ranks run asynchronously",
    {
        Collective.ALL_REDUCE: Collectives.all_reduce,
        Collective.ALL_GATHER: Collectives.all_gather,
        Collective.REDUCE_SCATTER: Collectives.reduce_scatter,
        Collective.ALL_TO_ALL: Collectives.all_to_all,
    },
    MOVING,
)


class _InFlight:
    """`keep` is a buffer that is read until the transfer is done."""

    def __init__(
        self,
        work: Waited,
        started_by: Collectives,
        results: Callable[[], list[torch.Tensor]],
        keep: torch.Tensor | None,
    ) -> None:
        self._work, self._started_by, self._results = work, started_by, results
        self._keep = keep

    def results(self) -> list[torch.Tensor]:
        wait_for(self._work, self._started_by.text)
        self._keep = None
        found = self._results()
        parts, dtypes = self._started_by.transfer.parts, self._started_by.dtypes
        for i, (part, dtype) in enumerate(zip(parts, dtypes, strict=True)):
            x = found[i]
            if x.shape != part.shape or x.dtype is not dtype:
                found[i] = x.reshape(part.shape).to(dtype)
        return found


def _with(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])
