"""Tensor memory while a program runs: blocks with owners, and the moment when most is held.

A block is the storage behind tensors that share memory. It dies when nobody
owns it any more, as in torch. The heap knows neither programs nor torch.
"""

from __future__ import annotations

import enum
from typing import final


class Use(enum.IntEnum):
    """What a block is needed for."""

    GRADIENT = 0
    SAVED = 1  # autograd keeps it for the backward pass
    COMMUNICATION = 2
    WORKSPACE = 3  # everything else
    HELD = 4  # alive before the step and after it: counted by those who know it


@final
class Block:
    """`bytes` of memory with `owners`, of which `savers` are nodes of the autograd graph."""

    __slots__ = ("bytes", "owners", "savers", "use")

    def __init__(self, size: int, use: Use) -> None:
        self.bytes, self.use = size, use
        self.owners = self.savers = 0

    @property
    def counts_as(self) -> Use:
        """What it is needed for now."""
        return Use.SAVED if self.savers and self.use is Use.WORKSPACE else self.use


@final
class Heap:
    """What is alive, by use, and what was when it was most.

    `where` is what happens now; `peak_at` what happened then. Blocks are as
    large as an allocator that hands out multiples of `granularity` makes them.
    """

    def __init__(self, granularity: int = 1) -> None:
        self.granularity = granularity
        self.live = [0] * len(Use)
        self.rounded = self.peak_rounded = 0
        self.total = self.peak = 0
        self.peak_by_use = tuple(self.live)
        self.where = self.peak_at = ""

    def new(self, size: int, use: Use = Use.WORKSPACE) -> Block:
        """A block that its caller owns."""
        block = Block(size, use)
        block.owners = 1
        if use is not Use.HELD:
            self._change(block, 1)
        return block

    def own(self, block: Block) -> Block:
        """The block, with one owner more."""
        block.owners += 1
        return block

    def drop(self, block: Block) -> None:
        """The block has one owner less."""
        block.owners -= 1
        assert block.owners >= 0, "a block is dropped more often than owned"
        if not block.owners and block.use is not Use.HELD:
            self._change(block, -1)

    def save(self, block: Block) -> Block:
        """Autograd owns the block, too."""
        block.owners += 1
        block.savers += 1
        if block.savers == 1 and block.use is Use.WORKSPACE:
            self.live[Use.WORKSPACE] -= block.bytes
            self.live[Use.SAVED] += block.bytes
        return block

    def unsave(self, block: Block) -> None:
        """Autograd owns it no more."""
        block.savers -= 1
        if not block.savers and block.use is Use.WORKSPACE:
            self.live[Use.SAVED] -= block.bytes
            self.live[Use.WORKSPACE] += block.bytes
        self.drop(block)

    def becomes(self, block: Block, use: Use) -> None:
        """The block is needed for something else from now on."""
        if block.use is not use and block.use is not Use.HELD:
            self.live[block.counts_as] -= block.bytes
            block.use = use
            self.live[block.counts_as] += block.bytes

    def briefly(self, size: int, use: Use = Use.WORKSPACE) -> None:
        """So many bytes are needed for a moment."""
        if size > 0:
            self.drop(self.new(size, use))

    def _change(self, block: Block, sign: int) -> None:
        size = sign * block.bytes
        self.live[block.counts_as] += size
        self.rounded += sign * (-block.bytes % self.granularity)
        self.total += size
        if self.total > self.peak:
            self.peak, self.peak_at = self.total, self.where
            self.peak_by_use = tuple(self.live)
            self.peak_rounded = self.rounded
