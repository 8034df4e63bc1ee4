"""Zigzag layout: early and late halves of tiles are swapped so that causal work is balanced.

Under a causal mask a device with only late queries would have most of the work. So of the 2n halves
of all tiles device i computes halves i and 2n − 1 − i, which is equal work on all devices. Outside
of the operator tiles are contiguous, so halves are swapped before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from shardwright.program.instructions import Run
from shardwright.runtime.comm.p2p_group import P2PGroup


class _Half(NamedTuple):
    """A half of a tile: the tile's owner, its start in the tile and in the whole, its length."""

    holder: int
    offset: int
    start: int
    length: int


@final
class Halves:
    """The assignment of halves of tiles along an axis to the devices that compute them (zigzag)."""

    def __init__(self, tiles: Sequence[Run], position: int, line: P2PGroup) -> None:
        self._line, self._place = line, position
        self._local_length = tiles[position][1]
        halves = [
            _Half(holder, offset, start + offset, size)
            for holder, (start, length) in enumerate(tiles)
            for offset, size in ((0, -(-length // 2)), (-(-length // 2), length // 2))
        ]
        last = len(halves) - 1
        self.of_each = [(halves[i], halves[last - i]) for i in range(len(tiles))]

    def runs(self, position: int) -> tuple[Run, ...]:
        """The rows that the device at `position` computes, early halves first."""
        return tuple((half.start, half.length) for half in self.of_each[position])

    def swapped(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The halves that this device computes, from all devices' tiles [..., length, width]."""
        mine = self.of_each[self._place]
        length = sum(half.length for half in mine)
        made = [x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in given]
        self._move(given, made, back=False)
        return tuple(made)

    def returned(self, *given: Tensor) -> tuple[Tensor, ...]:
        """This device's tiles, from results that were computed in halves."""
        made = [x.new_empty((*x.shape[:-2], self._local_length, x.shape[-1])) for x in given]
        self._move(given, made, back=True)
        return tuple(made)

    def _move(self, given: Sequence[Tensor], made: Sequence[Tensor], *, back: bool) -> None:
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrived: list[tuple[Tensor, Tensor]] = []
        for computer, halves in enumerate(self.of_each):
            at = 0
            for half in halves:
                local, computed = (
                    slice(half.offset, half.offset + half.length),
                    slice(at, at + half.length),
                )
                at += half.length
                ends = (half.holder, local), (computer, computed)
                (source, there), (goal, here) = reversed(ends) if back else ends
                if not half.length:
                    continue
                for old, new in zip(given, made, strict=True):
                    if source == goal == self._place:
                        new[..., here, :] = old[..., there, :]
                    elif source == self._place:
                        sends.append((goal, old[..., there, :].contiguous()))
                    elif goal == self._place:
                        part = new[..., here, :]
                        buffer = torch.empty_like(part, memory_format=torch.contiguous_format)
                        receives.append((source, buffer))
                        arrived.append((part, buffer))
        self._line.exchange(sends, receives)()
        for part, buffer in arrived:
            part.copy_(buffer)


class ZigzagSwap(torch.autograd.Function):
    """Swaps tiles to halves, or back; the backward pass swaps gradients the other way."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, back: bool, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.halves, ctx.back = halves, back
        return halves.returned(*given) if back else halves.swapped(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ZigzagSwap.apply(ctx.halves, not ctx.back, *grads)  # type: ignore[no-untyped-call]
        return None, None, *found
