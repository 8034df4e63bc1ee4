"""Describes a view of a storage, so that the same view of another storage can be taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class StorageView:
    """The dtype, shape and strides in which a tensor reads its memory.

    Complex numbers and their parts are views of one memory with other dtypes, strides and offsets,
    and conjugates and negatives are views whose numbers are changed as they are read.

    Attributes:
        dtype: of its elements, in which strides and the offset are counted.
        size, stride, offset: as of the tensor.
        conjugated: whether it has the conjugates of what is in memory.
        negated: whether it has the negatives of what is in memory.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageView:
        """The view that `tensor` is."""
        offset = int(tensor.storage_offset())
        bits = tensor.is_conj(), tensor.is_neg()
        return cls(tensor.dtype, tensor.size(), tensor.stride(), offset, *bits)

    def shifted(self, count: int) -> StorageView:
        """The same view `count` bytes further on, a multiple of the bytes of an element."""
        return replace(self, offset=self.offset + count // self.dtype.itemsize)

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the memory of `tensor`."""
        if tensor.dtype is self.dtype:
            found = tensor.as_strided(self.size, self.stride, self.offset)
        else:
            found = torch.empty(0, dtype=self.dtype, device=tensor.device)
            found.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)
        if self.conjugated:
            found = found.conj()
        return found.neg() if self.negated else found
