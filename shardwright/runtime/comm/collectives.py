"""Runs one step of a redistribution on a local tile with the process group's collectives.

A DTensor's way costs a millisecond of dispatch on a CPU, as much as the message of a small
tensor. Tiles are cut as `torch.chunk` cuts them, so the last ones may be shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Move
from shardwright.runtime.comm.spin_wait import Waited, exchange_over, reduce_over, wait_for

# Their names from torch 2.13 on, then those before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_TAG = 39  # keeps parts of gathers from other messages between the same two ranks
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}


class _Together:
    """Several messages on their way."""

    def __init__(self, works: Sequence[Waited]) -> None:
        self._works = list(works)

    def wait(self) -> None:
        """Until all are there."""
        while self._works:
            self._works.pop(0).wait()


def gather_into(buffer: torch.Tensor, group: dist.ProcessGroup, rank: int) -> Waited:
    """All ranks' equal parts of `buffer` on their way into it; this one's is there already.

    The buffer is contiguous, and its elements a multiple of the ranks.
    Gloo would gather in a buffer of its own, as large as this one, which its threads give back
    some time later. So there every rank sends its part to each other one.
    """
    parts = buffer.view(-1).chunk(group.size())
    if dist.get_backend(group) != "gloo":
        work: Waited | None
        work = all_gather_single(buffer.view(-1), parts[rank], group=group, async_op=True)
        assert work is not None
        return work
    works: list[Waited | None] = []
    for hop in range(1, len(parts)):
        there, back = (rank + hop) % len(parts), (rank - hop) % len(parts)
        works.append(dist.irecv(parts[back], group=group, tag=_TAG, group_src=back))
        works.append(dist.isend(parts[rank], group=group, tag=_TAG, group_dst=there))
    return _Together([work for work in works if work is not None])


def collected(x: torch.Tensor, move: Move, mesh: DeviceMesh) -> torch.Tensor:
    """`x` after `move`, which moves data along `mesh`, of one axis; in memory of its own.

    Tiles are seen as their atoms, one dimension each. Backends know few integers: others travel in
    wider ones, in which sums wrap around to the same.
    """
    if x.dtype in _WIDER:
        return collected(x.to(_WIDER[x.dtype]), move, mesh).to(x.dtype)
    group = mesh.get_group()
    match move.collective:
        case Collective.ALL_REDUCE:
            summed = x.clone(memory_format=torch.contiguous_format)
            reduce_over(group, summed)
            return summed
        case Collective.ALL_GATHER:
            return _gathered(x, move, group, mesh.get_local_rank())
        case Collective.REDUCE_SCATTER:
            return _scattered(x, move, group)
        case Collective.ALL_TO_ALL:
            return _exchanged(x, move, group, mesh.get_local_rank())
        case other:
            raise ValueError(f"{other} is no collective that ranks run")


def _gathered(x: torch.Tensor, move: Move, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """The tiles of all ranks along `move.src`, padded on their way to the size of the largest."""
    lengths = _lengths(move.whole[move.src], group.size())
    shape = _with(move.whole, move.src, lengths[0])
    buffer = x.new_empty((len(lengths), *shape))
    own = buffer[rank]  # where it will be, so that nothing is copied twice
    own.narrow(move.src, 0, lengths[rank]).copy_(x)
    wait_for(gather_into(buffer, group, rank), "a gather")
    if prod(move.whole[: move.src]) == 1:  # one after the other they are the whole
        joined = buffer.view(_with(move.whole, move.src, len(lengths) * lengths[0]))
        return joined.narrow(move.src, 0, move.whole[move.src])
    tiles = (tile.narrow(move.src, 0, n) for tile, n in zip(buffer, lengths, strict=True))
    return torch.cat(tuple(tiles), move.src)


def _scattered(x: torch.Tensor, move: Move, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's tile along `move.dst` of the ranks' sum."""
    if dist.get_backend(group) == "gloo":  # which sums the whole in any case
        summed = x.clone(memory_format=torch.contiguous_format)
        reduce_over(group, summed)
        own = summed.narrow(move.dst, move.start, move.length)
        return own.clone(memory_format=torch.contiguous_format)
    lengths = _lengths(move.whole[move.dst], group.size())
    shape = _with(move.whole, move.dst, lengths[0])
    given = x.new_zeros((len(lengths), *shape))
    for room, tile in zip(given, x.split(lengths, move.dst), strict=True):
        room.narrow(move.dst, 0, tile.shape[move.dst]).copy_(tile)
    own = x.new_empty(shape)
    reduce_scatter_single(own, given, group=group)
    return own.narrow(move.dst, 0, move.length)


def _exchanged(x: torch.Tensor, move: Move, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """This rank's tile along `move.dst`, of tiles along `move.src`."""
    come = _lengths(move.whole[move.src], group.size())
    leave = _lengths(move.whole[move.dst], group.size())
    pieces = x.split(leave, move.dst)
    sent = [piece.numel() for piece in pieces]
    given = x.new_empty(x.numel())
    for room, piece in zip(given.split(sent), pieces, strict=True):
        room.view(piece.shape).copy_(piece)
    shapes = [_with(_with(move.whole, move.dst, leave[rank]), move.src, n) for n in come]
    sizes = [prod(shape) for shape in shapes]
    found = x.new_empty(sum(sizes))
    exchange_over(group, found, given, sizes, sent)
    if prod(shapes[0][: move.src]) == 1:
        return found.view(_with(shapes[0], move.src, move.whole[move.src]))
    tiles = (part.view(shape) for part, shape in zip(found.split(sizes), shapes, strict=True))
    return torch.cat(tuple(tiles), move.src)


def _lengths(whole: int, ranks: int) -> list[int]:
    """Lengths of the tiles of a dimension; the first is the longest."""
    step = -(-whole // ranks)
    return [min(step, max(0, whole - rank * step)) for rank in range(ranks)]


def _with(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])
