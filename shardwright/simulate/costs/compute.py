"""Computes seconds of one operator on a device, forward and backward: the sum of its kernels.

A contraction has 2 · Π(sizes of the factors in `rule.work`) flop forward, and as many again for
every contracted operand that needs a gradient. `kernels.py` prices a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shardwright.machine.model import Device
from shardwright.simulate.costs.chunked.cast_loss import (
    cast_loss_backward_kernels,
    cast_loss_forward_kernels,
)
from shardwright.simulate.costs.chunked.loss import loss_backward_kernels, loss_forward_kernels
from shardwright.simulate.costs.chunked.mlp import mlp_backward_kernels, mlp_forward_kernels
from shardwright.simulate.costs.experts import products, row_kernels
from shardwright.simulate.costs.fp8_products import backward_casts, forward_casts, fp8_product
from shardwright.simulate.costs.kernels import (
    KernelWork,
    ProductShape,
    kernel_seconds,
    reached_at,
)
from shardwright.simulate.costs.op_calls import timed
from shardwright.simulate.costs.workload import (
    Floats,
    Ints,
    OperatorClass,
    Port,
    Workload,
    expert_share,
    product_of,
)

Bools = NDArray[np.bool_]

# Contractions in fused attention: Q·Kᵀ and P·V forward, and five backward, because the scores are
# computed again (Dao et al., "FlashAttention", 2022).
_ATTENTION_FORWARD, _ATTENTION_BACKWARD = 2, 5
_MOVING = (
    OperatorClass.MEMORY, OperatorClass.FUNCTION, OperatorClass.POOLING, OperatorClass.PART,
)  # fmt: skip
# Queries and keys of a tile of fused attention (Dao, "FlashAttention-2", 2023: 64 or 128 each).
_SCORE_TILE = 128
_PASSES_OF_SUM = 3  # over memory: both terms are read, the sum is written
# Bytes of traffic for each score in ring attention without a fused kernel, in float32: it is
# written, read for the exponential, and read for the product. Backward it is twice as much.
_SCORE_BYTES = 12
_EXPERTS_BACKWARD = 2  # products for each forward one: gradients of rows and of weights
_BY_TERMS = 2.0  # over one fused kernel: maximum, difference, exponential and sum are separate


def operator_seconds(
    work: Workload, sizes: Ints, device: Device, forward: Floats | None = None
) -> Floats:
    """Seconds forward and backward at local `sizes` of the factors, (factors, K): (K,).

    `forward` are the seconds of the forward pass, (K,), if they are known.
    """
    seconds = forward_seconds(work, sizes, device) if forward is None else forward
    return seconds + backward_seconds(work, sizes, device) if work.has_backward else seconds


def forward_seconds(work: Workload, sizes: Ints, device: Device) -> Floats:
    """Seconds of the forward pass at local `sizes` of the factors, (factors, K): (K,).

    From timings of the device if the operator has any, else from the formula.
    """
    if work.form is None:
        return _forward(work, sizes, device) * _by_terms(work, sizes)
    found = timed(
        lambda at: _forward(work, at, device), work.form, sizes, device.timings,
        lambda at: _as_one(work, at),
    )  # fmt: skip
    return found * _by_terms(work, sizes)


def forward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the forward pass at local `sizes` of the factors, (factors, K)."""
    if work.kind in (OperatorClass.VIEW, OperatorClass.PART):
        return ()
    if work.kind is OperatorClass.CHUNKED_LOSS:
        return loss_forward_kernels(work, sizes)
    if work.kind is OperatorClass.CAST_LOSS:
        return cast_loss_forward_kernels(work, sizes, _terms(work, sizes))
    if work.kind is OperatorClass.CHUNKED_MLP:
        return mlp_forward_kernels(work, sizes)
    written = _bytes(work.written, sizes)
    read = _bytes(work.read, sizes)
    if work.lookup:
        read = np.minimum(read, written * len(work.operands))
    if work.kind is OperatorClass.ATTENTION:
        once = contraction_flop(work, sizes)
        moved = read + written + _scores(work, sizes)
        return (_attention(work, sizes, once, moved, _ATTENTION_FORWARD),)
    shape = _product_shape(work, sizes)
    flop = contraction_flop(work, sizes)
    moved = read + written
    if work.kind is OperatorClass.EXPERTS:
        return (*products(work, sizes, flop, moved), *row_kernels(work, sizes))
    if work.fp8 is not None:
        x, weight = (work.operands[i] for i in work.contracted)
        others = _bytes((p for p in work.read if p not in (x, weight)), sizes)
        product = fp8_product(work.fp8, (x, weight), sizes, flop, shape, others + written)
        return (*forward_casts(work, work.fp8, sizes), product)
    return (KernelWork(work.kind, work.dtype, flop, moved, shape, launches=work.launches),)


def _forward(work: Workload, sizes: Ints, device: Device) -> Floats:
    return _sum(forward_kernels(work, sizes), sizes, device)


def backward_seconds(work: Workload, sizes: Ints, device: Device) -> Floats:
    """Seconds of the backward pass at local `sizes` of the factors, (factors, K): (K,).

    Only operands that need a gradient count. Included are kernels that add up the gradients of a
    result that several operators read.
    """
    if work.form is None:
        found = _backward(work, sizes, device)
    else:
        found = timed(
            lambda at: _backward(work, at, device), work.form, sizes, device.timings,
            lambda at: _as_one(work, at), backward=True,
        )  # fmt: skip
    found = found * _by_terms(work, sizes)
    for result, more in zip(work.results, work.added, strict=False):
        if more:
            moved = _PASSES_OF_SUM * result.local_bytes(sizes)
            waiting = moved / (device.bytes_per_s * reached_at(device.efficiency.memory, moved))
            found = found + more * (waiting + device.launch_seconds)
    return found


def _backward(work: Workload, sizes: Ints, device: Device) -> Floats:
    return _sum(backward_kernels(work, sizes), sizes, device)


def _sum(kernels: Iterable[KernelWork], sizes: Ints, device: Device) -> Floats:
    total = np.zeros(sizes.shape[1])
    for kernel in kernels:
        total = total + kernel_seconds(kernel, device)
    return total


def backward_kernels(work: Workload, sizes: Ints) -> tuple[KernelWork, ...]:
    """The kernels of the backward pass, without those that add up gradients of a result."""
    needed = [i for i, port in enumerate(work.operands) if port.requires_grad]
    given = _bytes((port for port in work.written if port.requires_grad), sizes)
    made = _bytes((work.operands[i] for i in needed), sizes)
    nothing = np.zeros(sizes.shape[1], np.int64)
    if work.kind is OperatorClass.VIEW:
        return ()
    if work.kind is OperatorClass.CHUNKED_LOSS:
        return loss_backward_kernels(work, sizes)
    if work.kind is OperatorClass.CAST_LOSS:
        return cast_loss_backward_kernels(work, sizes, _terms(work, sizes))
    if work.kind is OperatorClass.CHUNKED_MLP:
        return mlp_backward_kernels(work, sizes)
    if work.kind in _MOVING:
        made = _bytes((port for port in work.read if port.requires_grad), sizes)
        saved = (port for port in (*work.read, *work.written) if port.saved)
        touched = given + made + _bytes(saved, sizes)
        kind = work.kind if work.again else OperatorClass.MEMORY
        return (KernelWork(kind, work.dtype, nothing, touched, launches=work.launches),)
    flop = contraction_flop(work, sizes)
    if work.kind is OperatorClass.EXPERTS:
        moved = given + made + _bytes((*work.operands, *work.results), sizes)
        both = products(work, sizes, _EXPERTS_BACKWARD * flop, moved, backward=True)
        return (*both, *row_kernels(work, sizes, backward=True))
    if work.kind is OperatorClass.ATTENTION:
        moved = given + made + _bytes((*work.operands, *work.results), sizes)
        moved = moved + 2 * _scores(work, sizes)
        return (_attention(work, sizes, flop, moved, _ATTENTION_BACKWARD),)
    found: list[KernelWork] = []
    if work.fp8 is not None:
        found += backward_casts(work, work.fp8, sizes)
    for i in needed:
        own = work.operands[i].local_bytes(sizes)
        if i in work.contracted and work.fp8 is not None:
            (other,) = (work.operands[j] for j in work.contracted if j != i)
            shape = _product_shape(work, sizes, i)
            multiplied = work.results[0], other
            found.append(fp8_product(work.fp8, multiplied, sizes, flop, shape, own))
        elif i in work.contracted:
            others = _bytes((work.operands[j] for j in work.contracted if j != i), sizes)
            shape = _product_shape(work, sizes, i)
            found.append(KernelWork(work.kind, work.dtype, flop, given + others + own, shape))
        else:
            found.append(KernelWork(work.kind, work.dtype, nothing, given + own))
    return tuple(found)


def _product_shape(work: Workload, sizes: Ints, gradient_of: int = -1) -> ProductShape | None:
    """The sizes of a matrix product, or of the product for the gradient of an operand.

    `gradient_of` is the index of the operand, or -1. None unless the operator is a product of two
    contracted operands.
    """
    if work.kind is not OperatorClass.MATMUL or len(work.contracted) != 2:
        return None
    left, right = (set(work.operands[i].factors) for i in work.contracted)
    result = set(work.results[0].factors)
    if gradient_of == work.contracted[0]:
        left, result = result, left
    elif gradient_of == work.contracted[1]:
        right, result = result, right
    parts = (
        (left & result) - right,
        (right & result) - left,
        (left & right) - result,
        left & right & result,
    )
    return ProductShape(*(product_of(sizes, sorted(part)) for part in parts))


def _by_terms(work: Workload, sizes: Ints) -> Floats | float:
    """The factor of all of the operator's seconds by `_terms`."""
    if work.kind in (OperatorClass.CHUNKED_LOSS, OperatorClass.CAST_LOSS):
        return 1.0  # in chunks it is always computed by terms, and a cast is one kernel
    return _terms(work, sizes)


def _terms(work: Workload, sizes: Ints) -> Floats | float:
    """The factor of an operator's seconds: more than 1 where devices reduce terms within it."""
    if not work.internal_reductions:
        return 1.0
    whole = np.array(work.sizes)[list(work.internal_reductions)]
    return np.where(
        (sizes[list(work.internal_reductions)] < whole[:, None]).any(axis=0), _BY_TERMS, 1.0
    )


def _as_one(work: Workload, sizes: Ints) -> Bools:
    """Whether a tile is computed by the operator's plain call, at each of the sizes: (K,).

    That is not so if queries of causal attention, or keys of a ring, are split.
    """
    axis_placements = [*work.causal, *([work.passed] if work.passed >= 0 else [])]
    whole = np.array(work.sizes)[axis_placements]
    found: Bools = (sizes[axis_placements] == whole[:, None]).all(axis=0)
    return found


def contraction_flop(work: Workload, sizes: Ints) -> Ints:
    """Floating point operations of one contraction at local `sizes` of the factors: (K,)."""
    if not work.work:
        return np.zeros(sizes.shape[1], np.int64)
    flop = 2 * work.repeats * product_of(sizes, work.work)
    if work.experts:
        flop = (flop * expert_share(work, sizes)).astype(np.int64)
    if work.causal:
        # The last device is the slowest: its queries see all keys but, on average, half of its own.
        queries = product_of(np.array(work.sizes)[:, None], work.causal)
        share = product_of(sizes, work.causal) / queries
        if work.halves >= 0:  # early and late queries are divided evenly (zigzag)
            share = np.minimum(1.0, share * work.sizes[work.halves] / sizes[work.halves])
        flop = flop - (flop * (share / 2)).astype(np.int64)
    if work.passed >= 0:  # a ring computes with all keys
        flop = (flop * (work.sizes[work.passed] / sizes[work.passed])).astype(np.int64)
    return flop


def _attention(work: Workload, sizes: Ints, once: Ints, moved: Ints, times: int) -> KernelWork:
    """The kernel of fused attention: `times` contractions of `once` operations each, (K,)."""
    if not work.scores:
        return KernelWork(work.kind, work.dtype, times * once, moved)
    queries, keys = (product_of(sizes, factors) for factors in work.scores)
    blocks = work.sizes[work.passed] // sizes[work.passed] if work.passed >= 0 else 1
    rows, columns = (-(-count // _SCORE_TILE) for count in (queries, blocks * keys))
    pairs = np.maximum(1, 2 * blocks * product_of(sizes, work.work))
    seen = once / pairs  # part of all pairs
    # On the diagonal of a causal mask, tiles are computed in full.
    tiles = rows * columns * seen + (rows / 2 if work.causal else 0)
    computed = np.maximum(1, queries * blocks * keys * seen)
    whole = np.minimum(tiles, rows * columns) * _SCORE_TILE**2 / computed
    tiled = (times * once * whole).astype(np.int64)
    return KernelWork(work.kind, work.dtype, times * once, moved, tiled_flop=tiled)


def _scores(work: Workload, sizes: Ints) -> Ints:
    """Bytes of scores that ring attention writes and reads where no kernel is fused: (K,)."""
    if work.passed < 0 or work.fused_blocks:
        return np.zeros(sizes.shape[1], np.int64)
    scores = contraction_flop(work, sizes) // (2 * work.repeats * product_of(sizes, work.width))
    found: Ints = np.where(sizes[work.passed] < work.sizes[work.passed], _SCORE_BYTES * scores, 0)
    return found


def _bytes(ports: Iterable[Port], sizes: Ints) -> Ints:
    total = np.zeros(sizes.shape[1], np.int64)
    for port in ports:
        total = total + port.local_bytes(sizes)
    return total
