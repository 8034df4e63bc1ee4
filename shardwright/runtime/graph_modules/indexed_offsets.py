"""Shares one module between instructions that differ only in the offset of their tile.

A tensor that all their modules share selects the program that runs, so that one
compiled program serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import nn

from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    Attention,
    Dropout,
    DroppedMlp,
    Instruction,
    Move,
    Redistribute,
    Uniform,
    writes,
)
from shardwright.runtime.comm.redistribute import Redistribution, Step
from shardwright.runtime.graph_modules.fx import Special
from shardwright.runtime.random.dropout import GlobalAttention, GlobalDropout, GlobalUniform
from shardwright.runtime.sharded_ops.chunked import ChunkedDroppedMlp

# They may depend on the offset of a tile.
Varied = Redistribute | Dropout | Uniform | Attention | DroppedMlp


def module_of(
    instructions: Sequence[Varied], number: torch.Tensor, made: nn.Module, device: torch.device
) -> nn.Module:
    """The module `made` for the first of `instructions`, changed to run `instructions[number]`.

    `number` is int64 [1] and read at each call.
    """
    if isinstance(made, Redistribution):
        ways = [one for one in instructions if isinstance(one, Redistribute)]
        made.forward_moves = _merged([one.forward for one in ways], made.forward_moves, number)
        made.backward_moves = _merged([one.backward for one in ways], made.backward_moves, number)
        return made
    tiles = [one.positions for one in instructions if not isinstance(one, Redistribute)]
    drawn = made.dropout if isinstance(made, GlobalAttention | ChunkedDroppedMlp) else made
    assert isinstance(drawn, GlobalDropout | GlobalUniform), "others are seeded by where tiles lie"
    drawn.choose_by(number, tiles, device)
    return made


def _merged(
    ways: Sequence[tuple[Move, ...]], first: tuple[Step, ...], number: torch.Tensor
) -> tuple[Step, ...]:
    """Steps of the first way, those that are not the same in all ways chosen by `number`."""
    return tuple(
        step if all(move == moves[0] for move in moves) else _Varying(moves, number)
        for moves, step in zip(zip(*ways, strict=True), first, strict=True)
    )


@final
class _Varying:
    """A step that cuts, masks or embeds at an offset that depends on `number`."""

    def __init__(self, moves: Sequence[Move], number: torch.Tensor) -> None:
        self.move = moves[0]
        self.number = number
        starts = torch.tensor([move.start for move in moves], device=number.device)
        along = torch.arange(self.move.length, device=number.device)
        self.indices = starts[:, None] + along  # (programs, length of the tile)
        self.keeps = torch.tensor([move.keeps for move in moves], device=number.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.move.collective is Collective.MASK:
            return torch.where(self.keeps.index_select(0, self.number), x, torch.zeros_like(x))
        at = self.indices.index_select(0, self.number).squeeze(0)
        if self.move.collective is Collective.SLICE:
            return x.index_select(self.move.dst, at)
        assert self.move.collective is Collective.EMBED, "what communicates is the same for all"
        return x.new_zeros(self.move.whole).index_copy(self.move.src, at, x)


def chosen_by(
    number: torch.Tensor,
    variants: Sequence[Sequence[Instruction]],
    make: Callable[[Special], nn.Module],
    device: torch.device,
) -> Callable[[Special], nn.Module]:
    """`make`, except that a module of instructions that differ runs that of `variants[number]`."""
    varied: dict[str, list[Varied]] = {}
    for found in zip(*variants, strict=True):
        alternatives = [one for one in found if isinstance(one, Varied)]
        if any(one != found[0] for one in alternatives):
            varied[writes(found[0])[0]] = alternatives

    def chosen(instruction: Special) -> nn.Module:
        name = writes(instruction)[0]
        if isinstance(instruction, Varied) and name in varied:
            return module_of(varied[name], number, make(instruction), device)
        return make(instruction)

    return chosen
