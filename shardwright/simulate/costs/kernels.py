"""Seconds of a kernel on a device, from plain numbers (roofline).

A kernel takes `max(flop / (peak · efficiency), bytes / (bandwidth · efficiency)) + launch`
(Williams, Waterman and Patterson, "Roofline", 2009), and at least the time that the host needs to
issue it. On a device with `units`, a matrix product is cut into tiles that the units compute in
waves. The last wave is half full on average, and the start and end of a tile take as long as
`Device.product_depth` steps along its depth. Fused attention computes tiles of scores, also where
the sequence or the causal mask ends within one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.ir.options.fp8 import FLOAT8, MXFP8
from shardwright.machine.efficiency_curve import Curve
from shardwright.machine.model import Device
from shardwright.simulate.costs.workload import Floats, Ints, OperatorClass

_TILE = 128  # rows and columns of a matrix product that one unit computes at once
_LAST_WAVE = 0.5  # of a wave, the mean idle time of a unit in the last one
_DEEPEST_SPLIT = 4  # the most parts of the depth, which units share if tiles are few
_SPLIT_DEPTH = 1024  # the least depth of one part
_IN_8_BIT = (FLOAT8, MXFP8)


@dataclass(frozen=True, slots=True, eq=False)
class ProductShape:
    """Sizes of `count` matrix products of (rows, depth) and (depth, columns): (K,) each."""

    rows: Ints
    columns: Ints
    depth: Ints
    count: Ints


@dataclass(frozen=True, slots=True, eq=False)
class KernelWork:
    """One kernel under K tilings.

    Attributes:
        kind: the class of the operator, which decides the efficiency.
        dtype: the dtype of its arithmetic.
        flop: floating point operations, (K,).
        moved: bytes that it reads and writes, (K,).
        shape: the sizes of a matrix product; None for other kernels.
        launches: whether it is launched; False if it is fused into a preceding kernel.
        tiled_flop: of fused attention, the operations with all scores of its tiles, (K,).
        rate: of a matrix product, over what products of its dtype reach.
        queued: whether the host issues it while the device computes those before it.
    """

    kind: OperatorClass
    dtype: str
    flop: Ints
    moved: Ints
    shape: ProductShape | None = None
    launches: bool = True
    tiled_flop: Ints | None = None
    rate: float = 1.0
    queued: bool = False


def kernel_seconds(kernel: KernelWork, device: Device) -> Floats:
    """Seconds of `kernel` on `device`, from the end of the preceding kernel: (K,)."""
    efficiency = device.efficiency
    in_8_bit = kernel.dtype in _IN_8_BIT
    of_products = efficiency.of_float8 if in_8_bit else efficiency.matmul
    reached = {
        OperatorClass.MATMUL: of_products,
        OperatorClass.EXPERTS: of_products,
        OperatorClass.CONVOLUTION: efficiency.convolution,
        OperatorClass.ATTENTION: efficiency.attention,
    }.get(kernel.kind, 1.0)
    flop = kernel.tiled_flop if kernel.tiled_flop is not None and device.units else kernel.flop
    peak = device.peak_flop_per_s(kernel.dtype) * kernel.rate
    busy = flop / (peak * reached_at(reached, kernel.flop))
    if kernel.shape is not None and device.units:
        busy = busy / filled(kernel.shape, device, kernel.dtype)
    moving = {
        OperatorClass.FUNCTION: efficiency.of_functions,
        OperatorClass.POOLING: efficiency.of_pooling,
    }.get(kernel.kind, efficiency.memory)
    waiting = kernel.moved / (device.bytes_per_s * reached_at(moving, kernel.moved))
    alone = np.maximum(busy, waiting)
    if not kernel.launches:
        return alone
    alone = alone + device.launch_seconds
    paced = device.issue_seconds and not kernel.queued
    return np.maximum(alone, device.issue_seconds) if paced else alone


def reached_at(part: float | Curve, work: Ints) -> Floats | float:
    """The efficiency `part` at each amount of `work`, (K,), as `Curve.at`; a number is constant."""
    if not isinstance(part, Curve):
        return part
    works, parts = np.log(part.points).T
    found: Floats = np.exp(np.interp(np.log(np.maximum(work, 1)), works, parts))
    return found


def filled(shape: ProductShape, device: Device, dtype: str = "") -> Floats:
    """The rate of products of this shape as a fraction of a large product's, by tiles: (K,).

    In 8 bits the start and the end of a tile take as long as in 16, which is more steps.
    """
    depth: float = device.product_depth
    if dtype in _IN_8_BIT:
        depth *= device.peak_flop_per_s(dtype) / device.peak_flop_per_s("bfloat16")
    return fill_of(shape, device.units, depth)


def fill_of(shape: ProductShape, units: Ints | int, product_depth: float) -> Floats:
    """`filled` for a device of `units` and of this `product_depth`: (K,)."""
    tiles = np.maximum(1, -(-shape.rows // _TILE) * -(-shape.columns // _TILE) * shape.count)
    used = shape.rows * shape.columns * shape.count / (tiles * _TILE * _TILE)
    parts = np.clip(shape.depth // _SPLIT_DEPTH, 1, _DEEPEST_SPLIT)
    waves = np.where(tiles < units, tiles * parts, tiles) / units
    deep = shape.depth / (shape.depth + product_depth)
    found: Floats = used * deep * waves / (waves + _LAST_WAVE)
    return found
