"""Computes seconds and memory of an optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Tensor
from shardwright.ir.options.optimizer_spec import Implementation, MatrixUpdate, OptimizerSpec
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.machine.model import Device
from shardwright.program.step.lower.update import group_counts
from shardwright.simulate.costs.kernels import KernelWork, kernel_seconds, reached_at
from shardwright.simulate.costs.workload import Floats, Ints, OperatorClass

_LEAST_GROUP = 2**26  # bytes; updates of smaller groups take as long to launch as to run


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
    group_bytes: int = 0,
) -> int:
    """The most bytes of temporaries during the update of `tiles`.

    A foreach update has them for all tiles of a group of at most `group_bytes` bytes, with 0 for
    all tiles.

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
        groups = iter(group_counts(alone, group_bytes or sum(alone)))
        sizes = iter(alone)
        largest = max((sum(islice(sizes, count)) for count in groups), default=0)
        return max(most, spec.foreach_temporaries * largest)
    return max(most, spec.temporaries * max(alone, default=0))


def group_bytes_within(
    spec: OptimizerSpec,
    tiles: Sequence[UpdatedTile],
    implementation: Implementation,
    room: int,
) -> int:
    """The bytes of the largest groups whose update needs at most `room` bytes of temporaries.

    A group has at least one tile, and 64 MiB. 0: all tiles at once, which fit, or whose temporaries
    are no more for that: those of a loop are of one parameter, and a fused update has none.
    Optimizers of whole matrices are left as they are.

    >>> adamw, tiles = optimizer_spec("adamw"), [UpdatedTile((2**26,), 2**28, 4)] * 4
    >>> group_bytes_within(adamw, tiles, Implementation.FOREACH, 3 * 2**28) // 2**28
    3
    """
    foreach = implementation is Implementation.FOREACH and spec.matrix is None
    if not foreach or update_bytes(spec, tiles, implementation) <= room:
        return 0
    sizes = [tile.bytes for tile in tiles]
    found = max(*sizes, room // spec.foreach_temporaries, _LEAST_GROUP)
    return found if found < sum(sizes) else 0
