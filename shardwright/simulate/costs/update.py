"""Computes seconds and memory of an optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Tensor
from shardwright.ir.options.optimizer_spec import MatrixUpdate, OptimizerSpec
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

    If the dispatch of an operator on a DTensor was not measured (`Device.dispatch_seconds`), the
    update is priced as one kernel that reads weight, gradient and state once, and writes weight and
    state.

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
    if device.dispatch_seconds is None:
        moved = (3 + 2 * spec.state_tensors) * local_bytes
        return device.launch_seconds + moved / (device.bytes_per_s * device.efficiency.streaming)
    moved = spec.passes * local_bytes
    reached = reached_at(device.efficiency.in_place, moved // spec.calls)
    each = device.dispatch_seconds if ranks > 1 else device.launch_seconds
    once = device.parameter_seconds if ranks > 1 else 0.0
    found: Floats = once + spec.calls * each + moved / (device.bytes_per_s * reached)
    return np.asarray(found)


def update_bytes(
    spec: OptimizerSpec, tiles: Sequence[UpdatedTile], *, together: bool = False
) -> int:
    """The most bytes of temporaries during the update of `tiles`.

    `together`: whether the optimizer updates all tiles at once (foreach).

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
    if together:
        return max(most, spec.foreach_temporaries * sum(alone))
    return max(most, spec.temporaries * max(alone, default=0))
