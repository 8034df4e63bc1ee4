"""Tensors in the memory simulation: a block of memory and a view of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import contiguous_strides
from shardwright.machine.backends import BackendSpec
from shardwright.machine.expert_loads import ExpertSkew
from shardwright.machine.model import EXPERT_SKEW, PLAIN_BLOCK
from shardwright.simulate.memory.allocator import Block

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankModel:
    """Facts that a rank's memory depends on beside its program; figures as those of a `Machine`."""

    backend: BackendSpec
    channel_block: int = PLAIN_BLOCK
    expert_skew: ExpertSkew = EXPERT_SKEW


@dataclass(slots=True)
class View:
    """A tensor: a block seen with a shape and strides; `grad` if a gradient comes back to it."""

    block: Block
    shape: Shape
    strides: Shape
    dtype: str
    grad: bool = False

    @property
    def bytes(self) -> int:
        """Of its elements, however large the block is."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether it lies in memory in the order of its indices."""
        return 0 in self.shape or _squeezed(self.shape, self.strides) == _squeezed(
            self.shape, contiguous_strides(self.shape)
        )

    @property
    def dense(self) -> bool:
        """Whether its elements fill their memory, in any order of the dimensions."""
        pairs = sorted(_squeezed(self.shape, self.strides))
        expected = 1
        for stride, size in pairs:
            if stride != expected:
                return False
            expected *= size
        return True


def _squeezed(shape: Shape, strides: Shape) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that are longer than one."""
    return [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]
