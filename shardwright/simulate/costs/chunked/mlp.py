"""Kernels of an MLP in chunks of rows.

They are those of its products and of the steps between them on one chunk, as often as there are
chunks. The backward pass computes the first products and the steps again, and adds up the gradients
of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.simulate.costs.kernels import KernelWork, ProductShape
from shardwright.simulate.costs.workload import Ints, OperatorClass, Port, Workload, product_of

_WIDE = 4  # bytes of an element of a sum over chunks, at least
_PASSES_OF_SUM = 3  # over memory: both terms are read, the sum is written


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Sizes of one chunk, (K,) each, and bytes of an element."""

    rows: Ints
    width: Ints
    inner: Ints
    item: int

    @property
    def wide(self) -> Ints:
        """Bytes of a tensor of the inner width."""
        found: Ints = self.item * self.rows * self.inner
        return found

    def product(self, work: Workload, rows: Ints, columns: Ints, depth: Ints) -> KernelWork:
        """A product of (rows, depth) and (depth, columns)."""
        moved = self.item * (rows * depth + depth * columns + rows * columns)
        shape = ProductShape(rows, columns, depth, np.ones_like(rows))
        return KernelWork(
            OperatorClass.MATMUL, work.dtype, 2 * rows * columns * depth, moved, shape
        )


def mlp_forward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the forward pass at local `sizes` of the factors, (factors, K)."""
    chunk = _chunk(work, sizes)
    last = chunk.product(work, chunk.rows, chunk.width, chunk.inner)
    return (*_inner(work, chunk), last) * work.chunks


def mlp_backward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the backward pass."""
    chunk = _chunk(work, sizes)
    rows, width, inner = chunk.rows, chunk.width, chunk.inner
    found = [*_inner(work, chunk), chunk.product(work, rows, inner, width)]
    for step in work.steps:
        kind = step.kind if step.again else OperatorClass.MEMORY
        found.append(_moving(work, kind, (2 * step.tensors - 1) * chunk.wide))
        found += [_moving(work, OperatorClass.MEMORY, _PASSES_OF_SUM * chunk.wide)] * step.sums
    if work.operands[0].requires_grad:
        found += [chunk.product(work, rows, width, inner)] * _products(work)
    once: list[KernelWork] = []
    for port in work.operands[1:]:
        if not port.requires_grad:
            continue
        elements = product_of(sizes, port.factors)
        if not _is_weight(work, port):
            found.append(_moving(work, OperatorClass.MEMORY, chunk.item * rows * elements))
            continue
        found.append(chunk.product(work, elements // width, width, rows))
        if _sums_wider(work):
            summed, cast = (n * elements for n in (chunk.item + 2 * _WIDE, chunk.item + _WIDE))
            found.append(_moving(work, OperatorClass.MEMORY, summed))
            once.append(_moving(work, OperatorClass.MEMORY, cast))
    return (*(tuple(found) * work.chunks), *once)


def mlp_chunk_bytes(work: Workload, sizes: Ints) -> Ints:
    """Bytes of a chunk's tensors of inner width and their gradients, and of summed gradients: (K,).

    While gradients are summed in another dtype, one more of a weight exists.
    """
    chunk = _chunk(work, sizes)
    found: Ints = 2 * (_products(work) + len(work.steps)) * chunk.wide
    if _sums_wider(work):
        weights = [p for p in work.operands[1:] if p.requires_grad and _is_weight(work, p)]
        elements = [product_of(sizes, port.factors) for port in weights]
        found = found + sum(_WIDE * each for each in elements)
        found = found + chunk.item * np.maximum.reduce([np.zeros_like(found), *elements])
    return found


def _inner(work: Workload, chunk: _Chunk) -> Iterator[KernelWork]:
    """The first products of a chunk, and the steps behind them."""
    for _ in range(_products(work)):
        yield chunk.product(work, chunk.rows, chunk.inner, chunk.width)
    for step in work.steps:
        yield _moving(work, step.kind, step.tensors * chunk.wide)


def _moving(work: Workload, kind: OperatorClass, moved: Ints) -> KernelWork:
    return KernelWork(kind, work.dtype, np.zeros_like(moved), moved)


def _products(work: Workload) -> int:
    """The products of the input; one more is the last."""
    return work.repeats - 1


def _sums_wider(work: Workload) -> bool:
    """Whether gradients of weights are summed in another dtype than that of the weights."""
    return work.chunks > 1 and work.operands[0].item_bytes < _WIDE


def _is_weight(work: Workload, port: Port) -> bool:
    """Whether an operand is no bias: it has inner features, and those of the input or result."""
    x, result = work.operands[0].factors, work.results[0].factors
    ends = {*x, *result}.intersection(port.factors)
    return bool(ends) and not ends.issuperset(port.factors)


def _chunk(work: Workload, sizes: Ints) -> _Chunk:
    x, up = (frozenset(port.factors) for port in work.operands[:2])
    rows, width = (product_of(sizes, sorted(part)) for part in (x - up, x & up))
    inner = product_of(sizes, [factor for factor in work.work if factor not in x])
    return _Chunk(-(-rows // work.chunks), width, inner, work.operands[0].item_bytes)
