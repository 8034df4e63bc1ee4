"""Kernels of a cross entropy that casts half-precision logits to float32 for some rows at a time.

They are those of the cast and of the cross entropy on its copy, each on parts of the rows.
"""

from __future__ import annotations

import numpy as np

from shardwright.simulate.costs.kernels import KernelWork
from shardwright.simulate.costs.workload import Floats, Ints, OperatorClass, Workload, product_of

_WIDE = 4  # bytes of a number in float32


def cast_loss_forward_kernels(
    work: Workload, sizes: Ints, terms: Floats | float
) -> tuple[KernelWork, ...]:
    """The kernels of the forward pass at local `sizes` of the factors, (factors, K).

    `terms` is the factor of the seconds of the loss where devices share the classes, (K,).
    """
    return _cast(work, sizes), _loss(work, sizes, terms)


def cast_loss_backward_kernels(
    work: Workload, sizes: Ints, terms: Floats | float
) -> tuple[KernelWork, ...]:
    """The kernels of the backward pass, with the arguments of that of the forward pass."""
    return _loss(work, sizes, terms), _cast(work, sizes)


def _cast(work: Workload, sizes: Ints) -> KernelWork:
    """The cast of the logits, or of their gradient."""
    moved = (work.operands[0].item_bytes + _WIDE) * _logits(work, sizes)
    return KernelWork(OperatorClass.MEMORY, work.dtype, np.zeros_like(moved), moved)


def _loss(work: Workload, sizes: Ints, terms: Floats | float) -> KernelWork:
    """The loss, which reads the copy, or its gradient, which it writes."""
    moved: Ints = np.asarray(_WIDE * terms * _logits(work, sizes)).astype(np.int64)
    return KernelWork(OperatorClass.FUNCTION, work.dtype, np.zeros_like(moved), moved)


def _logits(work: Workload, sizes: Ints) -> Ints:
    return product_of(sizes, work.operands[0].factors)
