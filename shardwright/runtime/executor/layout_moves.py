"""Moves of a tile that need no communication: cuts, masks, embeddings among zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Move


def moved_locally(x: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """`x`, seen as its atoms, after `moves`; maybe a view of it."""
    for move in moves:
        x = _moved(x, move)
    return x


def _moved(x: torch.Tensor, move: Move) -> torch.Tensor:
    match move.collective:
        case Collective.SLICE:
            return x.narrow(move.dst, move.start, move.length)
        case Collective.MASK:
            return x if move.keeps else torch.zeros_like(x)
        case Collective.EMBED:
            whole = x.new_zeros(move.whole)
            whole.narrow(move.src, move.start, move.length).copy_(x)
            return whole
    raise ValueError(f"{move.collective} needs communication")
