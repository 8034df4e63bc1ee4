"""Computes seconds and memory of an optimizer's update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import NamedTuple

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Tensor
from shardwright.ir.options.optimizer_spec import Implementation, MatrixUpdate, OptimizerSpec
from shardwright.ir.options.optimizers import by_tiles, optimizer_spec
from shardwright.machine.model import Device
from shardwright.program.step.instructions import Update
from shardwright.program.step.lower.update import group_counts
from shardwright.simulate.costs.kernels import KernelWork, kernel_seconds, reached_at
from shardwright.simulate.costs.workload import Floats, Ints, OperatorClass

_LEAST_GROUP = 2**26  # bytes; updates of smaller groups take as long to launch as to run
# Bytes of parameters whose state is copied to the device at once: at most, and a fraction of all,
# since nothing hides the copies of the first group and of the last.
_MOST_COPIED, _LEAST_COPIED, _GROUPS = 2**26, 2**22, 16


class UpdatedTile(NamedTuple):
    """A rank's tile, of `bytes` bytes, of a parameter of `shape`."""

    shape: tuple[int, ...]
    bytes: int
    item_bytes: int

    def state_bytes(self, spec: OptimizerSpec) -> int:
        """Bytes of the optimizer's state for the tile."""
        return spec.tensors_of(self.shape) * self.bytes + spec.kept_of(self.shape) * self.item_bytes

    def resident_bytes(self, spec: OptimizerSpec) -> int:
        """Bytes of the optimizer's state for the tile that are kept on the device."""
        return 0 if spec.offload else self.state_bytes(spec)


@dataclass(frozen=True)
class UpdatePrices:
    """Seconds of the update of parameters, by name, and of one more group of them to launch.

    `copies` are those of state from the host, by parameter, and as many back; a group takes at most
    `group_copy`. With `streams` copies of both directions run beside each other and beside kernels.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    group: float = 0.0
    copies: Mapping[str, float] = field(default_factory=dict)
    group_copy: float = 0.0
    streams: bool = True

    def of(self, update: Update) -> tuple[float, float]:
        """Seconds of the kernels of an update, and of copies of state that these do not hide.

        Nothing hides the copy of the first group from the host, nor, where copies take longer than
        kernels, that of the last one back.
        """
        names = [name for name, _ in update.parameters]
        kernels = sum(self.seconds.get(name, 0.0) for name in names)
        if not update.on_host:
            return kernels + max(0, len(update.groups) - 1) * self.group, 0.0
        copies = sum(self.copies.get(name, 0.0) for name in names)
        first = min(copies, self.group_copy or copies)
        if first:  # groups of few layers do not say how many all layers have
            kernels += (ceil(copies / first - 1e-9) - 1) * self.group
        whole = max(kernels + first, copies) + first
        return kernels, whole - kernels if self.streams else 2 * copies

    def standing_for(self, stands_for: Mapping[str, str]) -> UpdatePrices:
        """The prices of a graph in which parameters stand for equal ones, by the others' names."""

        def summed(prices: Mapping[str, float]) -> Mapping[str, float]:
            found = defaultdict(float, prices)
            for name, like in stands_for.items():
                found[like] += prices.get(name, prices.get(like, 0.0))
            return found

        return replace(self, seconds=summed(self.seconds), copies=summed(self.copies))


def update_seconds(
    local_bytes: Ints, optimizer: str, device: Device, ranks: int, whole: Tensor | None = None
) -> Floats:
    """Seconds to update a parameter with tiles of `local_bytes` bytes: (K,) -> (K,).

    If the state is on the host, its copies hide the update, and each other: seconds are those of
    one direction. If the host updates parameters, they are those of its memory. Else the
    optimizer's implementation decides. A fused update, and any on CPUs without a measured dispatch
    (`Device.dispatch_seconds`), is one kernel that reads weight, gradient and state once, and
    writes weight and state. A foreach update on a GPU passes over them with every operator, all
    parameters in few launches; a loop launches each operator of each parameter, for which it waits
    for the host (`Device.issue_seconds`).

    Args:
        local_bytes: bytes of a rank's tile, (K,).
        optimizer: the name of the optimizer.
        device: the device.
        ranks: the number of ranks; with several, parameters are DTensors. Tiles are updated as
            plain tensors, whose operators take a launch each, if `by_tiles` says so.
        whole: the parameter, for optimizers that compute with whole matrices: every rank does so,
            and the time to gather them is not included.
    """
    spec = optimizer_spec(optimizer)
    if spec.on_host:
        return state_copy_seconds(local_bytes, spec, device)
    if spec.by_host:
        return _host_seconds(local_bytes, spec, device)
    matrix = None if whole is None else spec.matrix_of(whole.shape)
    if matrix is not None and whole is not None:
        alone = spec_of_tiles(spec, matrix)
        return _tiles_seconds(local_bytes, alone, device, ranks) + _whole_seconds(
            matrix, whole, device
        )
    return _tiles_seconds(local_bytes, spec, device, ranks)


def state_copy_seconds(local_bytes: Ints, spec: OptimizerSpec, device: Device) -> Floats:
    """Seconds to copy the state of parameters of `local_bytes` from the host, or back: (K,).

    They are infinite if the device states no rate.
    """
    rate = device.host_bytes_per_s
    return spec.state_tensors * local_bytes / rate if rate else np.full(local_bytes.shape, np.inf)


def _host_seconds(local_bytes: Ints, spec: OptimizerSpec, device: Device) -> Floats:
    """Seconds in which the host updates parameters of `local_bytes` in its memory: (K,).

    Its operators pass over them at the rate of copies to devices while all of these copy, which its
    memory reaches in any case; torch runs a loop unless a fused kernel is asked for.
    """
    rate = device.host_bytes_per_s
    fused = spec.implementation is Implementation.FUSED
    passes = spec.fused_passes if fused else spec.passes
    return passes * local_bytes / rate if rate else np.full(local_bytes.shape, np.inf)


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
    plain = ranks == 1 or by_tiles(spec)
    implementation = spec.runs(plain=plain, on_gpu=on_gpu)
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
    dispatched = device.launch_seconds if plain else device.dispatch_seconds
    launches = 1 if implementation is Implementation.FOREACH and on_gpu else calls
    once = device.parameter_seconds if ranks > 1 else 0.0
    found: Floats = once + launches * dispatched + moved / (device.bytes_per_s * reached)
    return np.asarray(found)


def host_group_bytes(parameter_bytes: int) -> int:
    """Bytes of parameters whose state is copied from the host at once, of those of a rank.

    >>> host_group_bytes(2**34) // 2**20, host_group_bytes(2**29) // 2**20
    (64, 32)
    """
    return max(_LEAST_COPIED, min(_MOST_COPIED, parameter_bytes // _GROUPS))


def update_bytes(
    spec: OptimizerSpec,
    tiles: Sequence[UpdatedTile],
    implementation: Implementation = Implementation.LOOP,
    group_bytes: int = 0,
) -> int:
    """The most bytes of temporaries during the update of `tiles`.

    A foreach update has them for all tiles of a group of at most `group_bytes` bytes, with 0 for
    all tiles. State on the host is there for three groups at once: one is updated while the state
    of the one before it leaves and that of the next one arrives. An update by the host needs none
    on the device.

    >>> tiles = [UpdatedTile((25,), 100, 4), UpdatedTile((75,), 300, 4)]
    >>> update_bytes(optimizer_spec("adamw"), tiles), update_bytes(optimizer_spec("sgd"), tiles)
    (600, 0)
    """
    if spec.by_host:
        return 0
    alone, most = [], 0
    for tile in tiles:
        matrix = spec.matrix_of(tile.shape)
        if matrix is None:
            alone.append(tile.bytes)
            continue
        item = ITEM_BYTES[matrix.dtype] if matrix.dtype else tile.item_bytes
        most = max(most, tile.bytes + matrix.temporaries(*tile.shape) * item)
    sizes = iter(alone)
    groups = [sum(islice(sizes, n)) for n in group_counts(alone, group_bytes or sum(alone))]
    if implementation is Implementation.FOREACH:
        most = max(most, spec.foreach_temporaries * max(groups, default=0))
    elif implementation is not Implementation.FUSED:
        most = max(most, spec.temporaries * max(alone, default=0))
    if not spec.on_host:
        return most
    around = (sum(groups[max(0, at - 1) : at + 2]) for at in range(len(groups)))
    return most + spec.state_tensors * max(around, default=0)


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
    if spec.by_host:
        return 0
    if spec.on_host:
        return host_group_bytes(sum(tile.bytes for tile in tiles))
    if not foreach or update_bytes(spec, tiles, implementation) <= room:
        return 0
    sizes = [tile.bytes for tile in tiles]
    found = max(*sizes, room // spec.foreach_temporaries, _LEAST_GROUP)
    return found if found < sum(sizes) else 0
