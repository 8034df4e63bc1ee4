"""Runs one step of a redistribution on a local tile with the process group's collectives.

DTensor's redistribution costs a millisecond of dispatch on a CPU, as much as a small message. Tiles
are cut as by `torch.chunk`, so the last ones may be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwright.ir.redistribution import LOCAL, MOVING, ByKind, Collective
from shardwright.program.instructions import Move
from shardwright.runtime.backend.base import wait_for
from shardwright.runtime.backend.registry import backend_of
from shardwright.runtime.comm.process_group import exchange_over, gather_into, reduce_over


def collected(x: torch.Tensor, move: Move, mesh: DeviceMesh) -> torch.Tensor:
    """`x` after `move`, which moves data along `mesh`, of one axis; in memory of its own.

    Tiles have one dimension per atom. Raises `ValueError` for a kind that moves no data or is
    unknown.
    """
    run = MOVES[move.collective]
    group, rank = mesh.get_group(), mesh.get_local_rank()
    sent = backend_of(group).wire_dtype(x.dtype)
    return run(x.to(sent), move, group, rank).to(x.dtype)


def _summed(x: torch.Tensor, _move: Move, group: dist.ProcessGroup, _rank: int) -> torch.Tensor:
    """The sum over the ranks."""
    summed = x.clone(memory_format=torch.contiguous_format)
    reduce_over(group, summed)
    return summed


def _gathered(x: torch.Tensor, move: Move, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """The whole along `move.src`; tiles are sent padded to the size of the largest tile."""
    lengths = _lengths(move.whole[move.src], group.size())
    shape = _with(move.whole, move.src, lengths[0])
    buffer = x.new_empty((len(lengths), *shape))
    own = buffer[rank]  # its final position, so that it is copied only once
    own.narrow(move.src, 0, lengths[rank]).copy_(x)
    wait_for(gather_into(buffer, group, rank), "a gather")
    if prod(move.whole[: move.src]) == 1:  # one after the other they are the whole
        joined = buffer.view(_with(move.whole, move.src, len(lengths) * lengths[0]))
        return joined.narrow(move.src, 0, move.whole[move.src])
    tiles = (tile.narrow(move.src, 0, n) for tile, n in zip(buffer, lengths, strict=True))
    return torch.cat(tuple(tiles), move.src)


def _scattered(x: torch.Tensor, move: Move, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """This rank's tile along `move.dst` of the ranks' sum."""
    backend = backend_of(group)
    if not backend.spec.native_reduce_scatter:  # such a backend all-reduces in any case
        summed = _summed(x, move, group, rank)
        own = summed.narrow(move.dst, move.start, move.length)
        return own.clone(memory_format=torch.contiguous_format)
    lengths = _lengths(move.whole[move.dst], group.size())
    shape = _with(move.whole, move.dst, lengths[0])
    given = x.new_zeros((len(lengths), *shape))
    for room, tile in zip(given, x.split(lengths, move.dst), strict=True):
        room.narrow(move.dst, 0, tile.shape[move.dst]).copy_(tile)
    own = x.new_empty(shape)
    backend.reduce_scatter(group, own, given, rank)
    return own.narrow(move.dst, 0, move.length)


def _exchanged(x: torch.Tensor, move: Move, group: dist.ProcessGroup, rank: int) -> torch.Tensor:
    """This rank's tile along `move.dst`, of tiles along `move.src`."""
    come = _lengths(move.whole[move.src], group.size())
    leave = _lengths(move.whole[move.dst], group.size())
    tiles = x.split(leave, move.dst)
    sent = [tile.numel() for tile in tiles]
    given = x.new_empty(x.numel())
    for room, tile in zip(given.split(sent), tiles, strict=True):
        room.view(tile.shape).copy_(tile)
    shapes = [_with(_with(move.whole, move.dst, leave[rank]), move.src, n) for n in come]
    sizes = [prod(shape) for shape in shapes]
    found = x.new_empty(sum(sizes))
    exchange_over(group, found, given, sizes, sent)
    if prod(shapes[0][: move.src]) == 1:
        return found.view(_with(shapes[0], move.src, move.whole[move.src]))
    tiles = (part.view(shape) for part, shape in zip(found.split(sizes), shapes, strict=True))
    return torch.cat(tuple(tiles), move.src)


MOVES = ByKind[Callable[[torch.Tensor, Move, dist.ProcessGroup, int], torch.Tensor]](
    "that ranks run",
    {
        Collective.ALL_REDUCE: _summed,
        Collective.ALL_GATHER: _gathered,
        Collective.REDUCE_SCATTER: _scattered,
        Collective.ALL_TO_ALL: _exchanged,
    },
    MOVING,
)


def moved_locally(x: torch.Tensor, move: Move) -> torch.Tensor:
    """`x` after `move`, which moves no data; it may be a view of `x`."""
    return LOCAL_MOVES[move.collective](x, move)


def _sliced(x: torch.Tensor, move: Move) -> torch.Tensor:
    return x.narrow(move.dst, move.start, move.length)


def _masked(x: torch.Tensor, move: Move) -> torch.Tensor:
    return x if move.keeps else torch.zeros_like(x)


def _embedded(x: torch.Tensor, move: Move) -> torch.Tensor:
    whole = x.new_zeros(move.whole)
    whole.narrow(move.src, move.start, move.length).copy_(x)
    return whole


LOCAL_MOVES = ByKind[Callable[[torch.Tensor, Move], torch.Tensor]](
    "that a rank runs alone",
    {Collective.SLICE: _sliced, Collective.MASK: _masked, Collective.EMBED: _embedded},
    LOCAL,
)


def _lengths(whole: int, ranks: int) -> list[int]:
    """Lengths of the tiles of a dimension; the first is the longest."""
    step = -(-whole // ranks)
    return [min(step, max(0, whole - rank * step)) for rank in range(ranks)]


def _with(shape: tuple[int, ...], dim: int, length: int) -> tuple[int, ...]:
    return (*shape[:dim], length, *shape[dim + 1 :])
