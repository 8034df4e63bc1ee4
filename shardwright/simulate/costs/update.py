"""Computes seconds and memory of an optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Tensor
from shardwright.ir.options.optimizer_spec import Implementation, MatrixUpdate, OptimizerSpec
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.machine.model import Device
from shardwright.simulate.costs.kernels import KernelWork, kernel_seconds, reached_at
from shardwright.simulate.costs.workload import Floats, Ints, OperatorClass


class UpdatedTile(NamedTuple):
    """A rank's tile, of `bytes` bytes, of a parameter of `shape`."""

    shape: tuple[int, ...]
    bytes: int
    item_bytes: int

    def state_bytes(self, spec: OptimizerSpec) -> int:
        """Bytes of the optimizer's state for the tile."""
        return spec.tensors_of(self.shape) * self.bytes + spec.kept_of(self.shape) * self.item_bytes


def update_seconds(
    local_bytes: Ints, optimizer: str, device: Device, ranks: int, whole: Tensor | None = None
) -> Floats:
    """Seconds to update a parameter with tiles of `local_bytes` bytes: (K,) -> (K,).

    The optimizer's implementation decides. A fused update, and any on CPUs without a measured
    dispatch (`Device.dispatch_seconds`), is one kernel that reads weight, gradient and state once,
    and writes weight and state. A foreach update on a GPU passes over them with every operator, all
    parameters in few launches; a loop launches each operator of each parameter, for which it waits
    for the host (`Device.issue_seconds`).

    Args:
        local_bytes: bytes of a rank's tile, (K,).
        optimizer: the name of the optimizer.
        device: the device.
        ranks: the number of ranks; with one, parameters are plain tensors, whose operators take a
            launch each.
        whole: the parameter, for optimizers that compute with whole matrices: every rank does so,
            and the time to gather them is not included.
    """
    spec = optimizer_spec(optimizer)
    matrix = None if whole is None else spec.matrix_of(whole.shape)
    if matrix is not None and whole is not None:
        alone = spec_of_tiles(spec, matrix)
        return _tiles_seconds(local_bytes, alone, device, ranks) + _whole_seconds(
            matrix, whole, device
        )
    return _tiles_seconds(local_bytes, spec, device, ranks)


def spec_of_tiles(spec: OptimizerSpec, matrix: MatrixUpdate) -> OptimizerSpec:
    """`spec` with the operators on tiles in the update of a matrix, without those on the whole."""
    passes = max(1, matrix.passes)
    return replace(
        spec, state_tensors=matrix.state_tensors, calls=-(-passes // 3), passes=passes, matrix=None
    )


def _whole_seconds(matrix: MatrixUpdate, whole: Tensor, device: Device) -> Floats:
    """Seconds of the operators on a whole matrix: (1,)."""
    rows, columns = whole.shape
    dtype = matrix.dtype or whole.dtype
    flop = np.array([matrix.flop(rows, columns)], np.int64)
    moved = np.array([3 * matrix.calls * rows * columns * ITEM_BYTES[dtype]], np.int64)
    one = KernelWork(OperatorClass.MATMUL, dtype, flop, moved)
    return kernel_seconds(one, device) + (matrix.calls - 1) * device.launch_seconds


def _tiles_seconds(local_bytes: Ints, spec: OptimizerSpec, device: Device, ranks: int) -> Floats:
    """Seconds of the operators on tiles: (K,)."""
    on_gpu = device.units > 0 or device.issue_seconds > 0
    implementation = spec.runs(plain=ranks == 1, on_gpu=on_gpu)
    unknown = device.dispatch_seconds is None and not on_gpu
    calls, passes = spec.calls, spec.passes
    if implementation is Implementation.FUSED or unknown:
        calls, passes = 1, spec.fused_passes
    moved = passes * local_bytes
    if device.dispatch_seconds is None:
        seconds = moved / (device.bytes_per_s * device.efficiency.streaming)
        if implementation is not Implementation.LOOP or unknown:
            return np.asarray(device.launch_seconds + seconds)
        each = np.maximum(device.launch_seconds + seconds / calls, device.issue_seconds)
        return np.asarray(calls * each)
    reached = reached_at(device.efficiency.in_place, moved // calls)
    dispatched = device.dispatch_seconds if ranks > 1 else device.launch_seconds
    once = device.parameter_seconds if ranks > 1 else 0.0
    found: Floats = once + calls * dispatched + moved / (device.bytes_per_s * reached)
    return np.asarray(found)


def update_bytes(
    spec: OptimizerSpec,
    tiles: Sequence[UpdatedTile],
    implementation: Implementation = Implementation.LOOP,
) -> int:
    """The most bytes of temporaries during the update of `tiles`.

    >>> tiles = [UpdatedTile((25,), 100, 4), UpdatedTile((75,), 300, 4)]
    >>> update_bytes(optimizer_spec("adamw"), tiles), update_bytes(optimizer_spec("sgd"), tiles)
    (600, 0)
    """
    alone, most = [], 0
    for tile in tiles:
        matrix = spec.matrix_of(tile.shape)
        if matrix is None:
            alone.append(tile.bytes)
            continue
        item = ITEM_BYTES[matrix.dtype] if matrix.dtype else tile.item_bytes
        most = max(most, tile.bytes + matrix.temporaries(*tile.shape) * item)
    if implementation is Implementation.FUSED:
        return most
    if implementation is Implementation.FOREACH:
        return max(most, spec.foreach_temporaries * sum(alone))
    return max(most, spec.temporaries * max(alone, default=0))
