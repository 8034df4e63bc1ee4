"""The kernels of a mixture of experts: its grouped products, routing of rows and steps between.

Counted in `tracing/own_operators/experts.py`: rows are sorted by expert, gathered, pass the steps
between the products, are copied to the order of tokens and summed. On a device that has some of the
experts (`runtime/sharded_ops/experts.py`) they are summed where they are. Scores scale the narrower
side of the second product. In 8 bits, rows before each product and weights are cast as those of a
linear layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shardwright.ir.options.fp8 import Cast
from shardwright.simulate.costs.fp8_products import cast_kernels
from shardwright.simulate.costs.kernels import KernelWork
from shardwright.simulate.costs.workload import (
    Ints,
    OperatorClass,
    Port,
    Workload,
    expert_share,
    product_of,
)

_INDEX_KERNELS = 6  # sort, division, positions, search, cast, and the scores in the order of rows
_INDEX_BYTES = 16  # that each of them reads and writes for a row
_BY_ROW = (2, 1, 2, 1)  # rows moved by: gather, zeros, copy, sum
_BY_ROW_OF_SOME = (2, 0, 1, 1)  # by: gather, a sort of indices, reading and writing of the sum
_SCALED = 2  # rows, or inputs of the second product, moved by their scale
_BIASED = 5  # rows moved by a bias: its look-up, and the sum
_TWICE = 2  # backward: gradients of both factors of a product, and sums of gradients


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sizes of the rows of a device's experts: how many, and elements of each, (K,).

    `width` are those of a token, `made` those of the first product's result, and `inner` those of
    the second product's input.
    """

    count: Ints
    width: Ints
    made: Ints
    inner: Ints


def _rows(work: Workload, sizes: Ints) -> _Rows:
    x, chosen, _, up, down, *_ = work.operands
    routed = product_of(sizes, work.routed or chosen.factors)
    tokens = [factor for factor in x.factors if factor in chosen.factors]
    width = product_of(sizes, [factor for factor in x.factors if factor not in tokens])
    each = np.maximum(1, product_of(sizes, work.experts) * width)
    made, inner = (product_of(sizes, port.factors) // each for port in (up, down))
    count = np.ceil(routed * expert_share(work, sizes)).astype(np.int64)
    return _Rows(count, width, made, inner)


def products(
    work: Workload, sizes: Ints, flop: Ints, moved: Ints, *, backward: bool = False
) -> Iterator[KernelWork]:
    """The grouped products as one kernel that moves `moved` bytes, (K,), and casts before it.

    Those of the backward pass are for the gradients of rows and weights.
    """
    if work.fp8 is None:
        yield KernelWork(work.kind, work.dtype, flop, moved)
        return
    recipe, rows = work.fp8.recipe, _rows(work, sizes)
    given = rows.width, rows.inner
    if backward:
        yield from _row_casts(recipe.gradient, rows, (rows.width, rows.made), work)
    activation = recipe.activation_again if backward else recipe.activation
    yield from _row_casts(activation, rows, given, work)
    yield from _weight_casts(recipe.weight_again if backward else recipe.weight, work, sizes)
    yield _in_8_bit(work, sizes, flop, moved)


def _row_casts(
    cast: Cast, rows: _Rows, widths: Iterable[Ints], work: Workload
) -> Iterator[KernelWork]:
    for width in widths:
        yield from cast_kernels(cast, rows.count * width, work.operands[0].item_bytes, work.dtype)


def _weight_casts(cast: Cast, work: Workload, sizes: Ints) -> Iterator[KernelWork]:
    assert work.fp8 is not None
    for weight in _weights(work):
        elements = product_of(sizes, weight.factors)
        share = work.fp8.weight_share
        yield from cast_kernels(cast, elements, weight.item_bytes, work.dtype, share)


def _in_8_bit(work: Workload, sizes: Ints, flop: Ints, moved: Ints) -> KernelWork:
    """Products that read their weights in 8 bits; `moved` counts these in the model's dtype."""
    assert work.fp8 is not None
    recipe = work.fp8.recipe
    narrower = sum(
        (product_of(sizes, port.factors) * (port.item_bytes - 1 - recipe.scale_bytes))
        for port in _weights(work)
    )
    bytes_left = (moved - narrower).astype(np.int64)
    return KernelWork(work.kind, recipe.products, flop, bytes_left, rate=recipe.rate)


def _weights(work: Workload) -> Iterable[Port]:
    return work.operands[3:5]


def row_kernels(work: Workload, sizes: Ints, *, backward: bool = False) -> Iterator[KernelWork]:
    """The memory-bound kernels at local `sizes` of the factors, (factors, K)."""
    item_bytes, rows = work.operands[0].item_bytes, _rows(work, sizes)
    nothing = np.zeros(sizes.shape[1], np.int64)
    moved = [_INDEX_BYTES * rows.count] * _INDEX_KERNELS
    width, every = rows.width * item_bytes, expert_share(work, sizes) == 1.0
    for whole, some in zip(_BY_ROW, _BY_ROW_OF_SOME, strict=True):
        moved.append(np.where(every, whole, some) * rows.count * width)
    moved += [_SCALED * rows.count * _scaled_width(work, rows) * item_bytes]
    moved += [step.tensors * rows.count * rows.inner * item_bytes for step in work.steps]
    moved += [_BIASED * rows.count * width * item_bytes for width in _bias_widths(work, sizes)]
    for each in moved * (_TWICE if backward else 1):
        yield KernelWork(OperatorClass.MEMORY, work.dtype, nothing, each)


def _bias_widths(work: Workload, sizes: Ints) -> Iterator[Ints]:
    """Elements of each bias for a row: (K,)."""
    for bias in work.operands[5:]:
        yield product_of(sizes, bias.factors) // product_of(sizes, work.experts)


def _scaled_width(work: Workload, rows: _Rows) -> Ints:
    """Elements of a row that its score scales, as `experts.scales_inside` decides it: (K,)."""
    x, _, scores, *_ = work.operands
    if scores.item_bytes != x.item_bytes and (scores.item_bytes, x.item_bytes) != (4, 2):
        return rows.width
    return np.minimum(rows.inner, rows.width)
