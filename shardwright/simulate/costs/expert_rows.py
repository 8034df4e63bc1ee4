"""The kernels of a mixture of experts beside its grouped products: routing of rows and steps.

Counted in `tracing/own_operators/experts.py`: rows are sorted by expert, gathered, pass the steps
between the products, are scaled by their scores, copied to the order of tokens and summed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.simulate.costs.kernels import KernelWork
from shardwright.simulate.costs.workload import (
    Ints,
    OperatorClass,
    Workload,
    expert_share,
    product_of,
)

_INDEX_KERNELS = 6  # sort, division, positions, search, cast, and the scores in the order of rows
_INDEX_BYTES = 16  # that each of them reads and writes for a row
_BY_ROW = (2, 2, 1, 2, 1)  # rows moved by: gather, scale, zeros, copy, sum
_TWICE = 2  # backward: gradients of both factors of a product, and sums of gradients


def row_kernels(work: Workload, sizes: Ints, *, backward: bool = False) -> Iterator[KernelWork]:
    """The memory-bound kernels at local `sizes` of the factors, (factors, K)."""
    x, chosen, _, _, down, *_ = work.operands
    routed = product_of(sizes, work.routed or chosen.factors)
    rows = np.ceil(routed * expert_share(work, sizes)).astype(np.int64)
    tokens = [factor for factor in x.factors if factor in chosen.factors]
    width = product_of(sizes, [factor for factor in x.factors if factor not in tokens])
    experts = product_of(sizes, work.experts)
    inner = product_of(sizes, down.factors) // np.maximum(1, experts * width)
    nothing = np.zeros(sizes.shape[1], np.int64)
    moved = [_INDEX_BYTES * rows] * _INDEX_KERNELS
    moved += [count * rows * width * x.item_bytes for count in _BY_ROW]
    moved += [step.tensors * rows * inner * x.item_bytes for step in work.steps]
    for each in moved * (_TWICE if backward else 1):
        yield KernelWork(OperatorClass.MEMORY, work.dtype, nothing, each)
