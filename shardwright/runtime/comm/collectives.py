"""Collectives of plain tensors over a process group, several tensors at once.

DTensor's redistribution costs a millisecond of dispatch on a CPU, as much as a small message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.redistribution import MOVING, ByKind, Collective
from shardwright.program.instructions import Move
from shardwright.runtime.backend.base import Waited, wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.tile_split import (
    TileSplit,
    gather_buffer,
    gathered,
    scatter_buffer,
)
from shardwright.runtime.comm.zigzag import HalfMove, half_moves


def collected(x: torch.Tensor, move: Move, mesh: DeviceMesh) -> torch.Tensor:
    """`x` after `move`, which moves data along `mesh`, of one axis; in memory of its own.

    Tiles have one dimension per atom. Raises `ValueError` for a kind that moves no data or is
    unknown.
    """
    bucket = Bucket((move,), mesh.get_group(), mesh.get_local_rank())
    sent = x.to(bucket.backend.wire_dtype(x.dtype))
    (found,) = bucket.start([sent], [sent is not x]).results(move.collective.value)
    return found.to(x.dtype)


class Arriving:
    """A collective that was started; `sent` is a buffer that is read until it is done."""

    def __init__(
        self,
        work: Waited,
        results: Callable[[], list[torch.Tensor]],
        sent: torch.Tensor | None = None,
    ) -> None:
        self._work, self._results, self._sent = work, results, sent

    def results(self, what: str) -> list[torch.Tensor]:
        """Wait until it is done, which a hung rank reports as `what`; the tensors, in order."""
        wait_for(self._work, what)
        self._sent = None
        return self._results()


class Bucket:
    """Tensors that one collective moves at once among the ranks of a group.

    `moves` has the move of each tensor, all of one kind. Raises `ValueError` for a kind that moves
    no data or is unknown.
    """

    def __init__(self, moves: Sequence[Move], group: dist.ProcessGroup, rank: int) -> None:
        self.moves, self.kind = moves, moves[0].collective
        self.group, self.rank, self.ranks = group, rank, group.size()
        self.backend = backend_of(group)
        self._start = STARTS[self.kind]
        dims = [move.src if self.kind.tiled == "src" else move.dst for move in moves]
        self.tiles = [
            TileSplit(move.whole, dim, self.ranks)
            for move, dim in zip(moves, dims, strict=True)
            if self.kind.tiled
        ]

    @property
    def writes_into(self) -> bool:
        """Whether the result may overwrite the operand, if nothing else reads that."""
        return len(self.moves) == 1 and self.kind.overwrites

    def start(self, given: list[torch.Tensor], owned: list[bool]) -> Arriving:
        """Begin to move this rank's tensors; nothing else reads those that are `owned`."""
        return self._start(self, given, owned)

    def all_reduce(self, given: list[torch.Tensor], owned: list[bool]) -> Arriving:
        if len(given) == 1:
            (x,) = given
            if not owned[0] or not x.is_contiguous():
                x = x.clone(memory_format=torch.contiguous_format)
            return Arriving(self._begin_sum(x), lambda: [x])
        buffer = torch.cat([x.reshape(-1) for x in given])
        shapes = [x.shape for x in given]

        def split() -> list[torch.Tensor]:
            tiles = buffer.split([prod(shape) for shape in shapes])
            return [tile.view(shape) for tile, shape in zip(tiles, shapes, strict=True)]

        return Arriving(self._begin_sum(buffer), split)

    def _begin_sum(self, x: torch.Tensor) -> Waited:
        return self.backend.begin_reduce(self.group, x, dist.ReduceOp.SUM)

    def all_gather(self, given: list[torch.Tensor], _owned: list[bool]) -> Arriving:
        buffer = gather_buffer(self.tiles, given, self.rank)
        work = self.backend.begin_gather(self.group, buffer, self.rank)
        return Arriving(work, lambda: gathered(self.tiles, buffer))

    def reduce_scatter(self, given: list[torch.Tensor], _owned: list[bool]) -> Arriving:
        if len(given) == 1 and self.tiles[0].in_order and given[0].is_contiguous():
            buffer = given[0].view(-1)
        else:
            buffer = scatter_buffer(self.tiles, given)
        rooms = [tile.room for tile in self.tiles]
        own = buffer.new_empty(sum(rooms))
        work = self.backend.begin_reduce_scatter(self.group, own, buffer, self.rank)

        def scattered() -> list[torch.Tensor]:
            shapes = [tile.shape(self.rank) for tile in self.tiles]
            chunks = own.split(rooms)
            return [x[: prod(shape)].view(shape) for x, shape in zip(chunks, shapes, strict=True)]

        return Arriving(work, scattered)

    def all_to_all(self, given: list[torch.Tensor], _owned: list[bool]) -> Arriving:
        (x,), (move,) = given, self.moves
        leave = TileSplit(move.whole, move.dst, self.ranks)
        kept = (*move.whole[: move.dst], move.length, *move.whole[move.dst + 1 :])
        come = TileSplit(kept, move.src, self.ranks)
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
            if come.leads:
                return [found.view(come.whole)]
            tiles = zip(found.split(sizes), shapes, strict=True)
            return [torch.cat([tile.view(shape) for tile, shape in tiles], move.src)]

        return Arriving(work, joined, sent=message)

    def swap(self, given: list[torch.Tensor], _owned: list[bool]) -> Arriving:
        """Halves go to the ranks that have them in zigzag order, or return."""
        (x,), (move,) = given, self.moves
        dim, back = move.src, self.kind is Collective.SWAP_BACK
        leave, come = half_moves(move.whole[dim], self.ranks, self.rank, back=back)
        each = x.numel() // max(1, x.shape[dim])  # elements for each index along the dimension
        message = torch.cat([x.narrow(dim, one.start, one.length).reshape(-1) for one in leave])
        shape = [*x.shape[:dim], sum(one.length for one in come), *x.shape[dim + 1 :]]
        arriving = x.new_empty(prod(shape))
        sizes = (self._by_rank(come, each), self._by_rank(leave, each))
        work = self.backend.begin_exchange(self.group, arriving, message, *sizes)

        def placed() -> list[torch.Tensor]:
            found = arriving.new_empty(shape)
            halves = arriving.split([one.length * each for one in come])
            for one, half in zip(come, halves, strict=True):
                part = found.narrow(dim, one.start, one.length)
                part.copy_(half.view(part.shape))
            return [found]

        return Arriving(work, placed, sent=message)

    def _by_rank(self, halves: Sequence[HalfMove], each: int) -> list[int]:
        """Elements of the halves that are sent to each rank, or received from it."""
        sizes = [0] * self.ranks
        for one in halves:
            sizes[one.peer] += one.length * each
        return sizes


# Each function starts a collective; the flags mark tensors whose memory it may overwrite.
STARTS = ByKind[Callable[[Bucket, list[torch.Tensor], list[bool]], Arriving]](
    "that ranks run",
    {
        Collective.ALL_REDUCE: Bucket.all_reduce,
        Collective.ALL_GATHER: Bucket.all_gather,
        Collective.REDUCE_SCATTER: Bucket.reduce_scatter,
        Collective.ALL_TO_ALL: Bucket.all_to_all,
        Collective.SWAP: Bucket.swap,
        Collective.SWAP_BACK: Bucket.swap,
    },
    MOVING,
)
