"""Kernels of a projection and cross entropy in chunks of the vocabulary.

They are those of the projection, the cast and the cross entropy on the logits of one chunk, as
often as there are chunks. The backward pass computes the logits again, and adds up the gradient of
the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.simulate.costs.kernels import KernelWork, ProductShape
from shardwright.simulate.costs.workload import Ints, OperatorClass, Workload, product_of

_BY_TERMS = 2  # over one fused kernel: maximum, difference, exponential and sum are separate


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Sizes of one chunk: (K,) each."""

    tokens: Ints
    classes: Ints
    width: Ints

    @property
    def logits(self) -> Ints:
        return self.tokens * self.classes

    @property
    def operands(self) -> Ints:
        """Elements of hidden states and of the chunk of the weight."""
        return (self.tokens + self.classes) * self.width


def loss_forward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the forward pass at local `sizes` of the factors, (factors, K)."""
    chunk = _chunk(work, sizes)
    read = _BY_TERMS * _wide(work) * chunk.logits
    return (*_logits(work, chunk), _kernel(work, OperatorClass.FUNCTION, read)) * work.chunks


def loss_backward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the backward pass."""
    chunk, item, wide = _chunk(work, sizes), work.operands[0].item_bytes, _wide(work)
    found = [*_logits(work, chunk)]
    found.append(_kernel(work, OperatorClass.FUNCTION, 2 * wide * chunk.logits))
    if wide > item:
        found.append(_kernel(work, OperatorClass.MEMORY, (item + wide) * chunk.logits))
    moved = item * (chunk.operands + chunk.logits)
    if work.operands[0].requires_grad:
        shape = ProductShape(chunk.tokens, chunk.width, chunk.classes, np.ones_like(chunk.tokens))
        found.append(_kernel(work, OperatorClass.MATMUL, moved, shape))
        if work.chunks > 1:  # a product is read, and the sum read and written
            summed = (item + 2 * wide) * chunk.tokens * chunk.width
            found.append(_kernel(work, OperatorClass.MEMORY, summed))
    if work.operands[1].requires_grad:
        shape = ProductShape(chunk.classes, chunk.width, chunk.tokens, np.ones_like(chunk.tokens))
        found.append(_kernel(work, OperatorClass.MATMUL, moved, shape))
    return tuple(found) * work.chunks


def loss_chunk_bytes(work: Workload, sizes: Ints) -> Ints:
    """Bytes of the logits of a chunk and of their casts, and of the summed gradient: (K,)."""
    chunk, item, wide = _chunk(work, sizes), work.operands[0].item_bytes, _wide(work)
    cast = item if wide > item else 0
    summed = wide if wide > item and work.chunks > 1 else 0
    found: Ints = (wide + cast) * chunk.logits + (summed + item) * chunk.tokens * chunk.width
    return found


def _logits(work: Workload, chunk: _Chunk) -> tuple[KernelWork, ...]:
    """The projection to the logits of a chunk, and their cast."""
    item, wide = work.operands[0].item_bytes, _wide(work)
    shape = ProductShape(chunk.tokens, chunk.classes, chunk.width, np.ones_like(chunk.tokens))
    moved = item * (chunk.operands + chunk.logits)
    product = _kernel(work, OperatorClass.MATMUL, moved, shape)
    if wide == item:
        return (product,)
    return product, _kernel(work, OperatorClass.MEMORY, (item + wide) * chunk.logits)


def _kernel(
    work: Workload, kind: OperatorClass, moved: Ints, shape: ProductShape | None = None
) -> KernelWork:
    flop = np.zeros_like(moved)
    if shape is not None:
        flop = 2 * shape.rows * shape.columns * shape.depth
    return KernelWork(kind, work.dtype, flop, moved, shape)


def _chunk(work: Workload, sizes: Ints) -> _Chunk:
    hidden, weight = (set(port.factors) for port in work.operands[:2])
    tokens, classes, width = (
        product_of(sizes, sorted(part))
        for part in (hidden - weight, weight - hidden, hidden & weight)
    )
    return _Chunk(tokens, -(-classes // work.chunks), width)


def _wide(work: Workload) -> int:
    """Bytes of an element of the logits in the dtype of the loss, at least of float32."""
    return max(4, work.operands[0].item_bytes)
