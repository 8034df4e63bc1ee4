"""Kernels of a linear layer in 8 bits: its products, and the casts of what they multiply.

A cast moves what the recipe says (`ir/options/fp8.py`). Products read operands and scales in 8 bits
and write results in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwright.ir.options.fp8 import Cast
from shardwright.simulate.costs.kernels import KernelWork, ProductShape
from shardwright.simulate.costs.workload import (
    Fp8Work,
    Ints,
    OperatorClass,
    Port,
    Workload,
    product_of,
)


def forward_casts(work: Workload, fp8: Fp8Work, sizes: Ints) -> Iterator[KernelWork]:
    """The casts before the product of the forward pass, at local `sizes`, (factors, K)."""
    given, weight = (work.operands[i] for i in work.contracted)
    if fp8.casts_input:
        yield from _kernels(fp8.recipe.activation, given, work, sizes)
    yield from _kernels(fp8.recipe.weight, weight, work, sizes, fp8.weight_share)


def backward_casts(work: Workload, fp8: Fp8Work, sizes: Ints) -> Iterator[KernelWork]:
    """The casts before the products for those gradients that are wanted."""
    given, weight = (work.operands[i] for i in work.contracted)
    yield from _kernels(fp8.recipe.gradient, work.results[0], work, sizes)
    if given.requires_grad:
        yield from _kernels(fp8.recipe.weight_again, weight, work, sizes, fp8.weight_share)
    if weight.requires_grad and fp8.casts_input:
        yield from _kernels(fp8.recipe.activation_again, given, work, sizes)


def fp8_product(
    fp8: Fp8Work,
    multiplied: tuple[Port, Port],
    sizes: Ints,
    flop: Ints,
    shape: ProductShape | None,
    written: Ints,
) -> KernelWork:
    """A product of two operands, which writes `written` bytes in the model's dtype: (K,) each."""
    one, other = (product_of(sizes, port.factors) for port in multiplied)
    moved = ((one + other) * (1 + fp8.recipe.scale_bytes)).astype(np.int64) + written
    dtype, rate = fp8.recipe.products, fp8.recipe.rate
    return KernelWork(OperatorClass.MATMUL, dtype, flop, moved, shape, rate=rate)


def _kernels(
    cast: Cast, port: Port, work: Workload, sizes: Ints, share: float = 1.0
) -> Iterator[KernelWork]:
    return cast_kernels(cast, product_of(sizes, port.factors), port.item_bytes, work.dtype, share)


def cast_kernels(
    cast: Cast, elements: Ints, item_bytes: int, dtype: str, share: float = 1.0
) -> Iterator[KernelWork]:
    """The kernels of a cast of `elements`, (K,), of which each micro-batch has a `share`."""
    for each in cast.bytes_each(item_bytes):
        yield KernelWork(
            OperatorClass.MEMORY,
            dtype,
            np.zeros_like(elements),
            (elements * each * share).astype(np.int64),
            launches=share == 1,
            queued=True,
        )
