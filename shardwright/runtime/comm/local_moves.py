"""Moves of a tile that need no communication: cuts, masks, embeddings among zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwright.ir.redistribution import LOCAL, ByKind, Collective
from shardwright.program.instructions import Move


def moved_locally(x: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """`x`, which has one dimension per atom, after `moves`; it may be a view of `x`."""
    for move in moves:
        x = LOCAL_MOVES[move.collective](x, move)
    return x


def _sliced(x: torch.Tensor, move: Move) -> torch.Tensor:
    if move.halves:
        return torch.cat([x.narrow(move.dst, *run) for run in move.halves], move.dst)
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
