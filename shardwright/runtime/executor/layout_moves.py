"""Moves of a tile that need no communication: cuts, masks, embeddings among zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.program.instructions import Move
from shardwright.runtime.comm import collectives


def moved_locally(x: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """`x`, seen as its atoms, after `moves`; maybe a view of it."""
    for move in moves:
        x = collectives.moved_locally(x, move)
    return x
