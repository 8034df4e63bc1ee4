"""Seconds and memory of an optimizer's update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.machine.model import Device
from shardwright.simulate.costs.kernels import reached_at
from shardwright.simulate.costs.workload import Floats, Ints


def update_seconds(local_bytes: Ints, optimizer: str, device: Device, ranks: int) -> Floats:
    """Seconds to update parameter tiles of `local_bytes` bytes, with their transfers, as (K,).

    Where the cost of an operator on a stored parameter is not measured (`Device.dispatch_seconds`),
    the update is priced as one kernel that reads weight, gradient and state once, and writes weight
    and state. Parameters of a single rank are plain tensors, whose operators cost a launch each.
    """
    spec = optimizer_spec(optimizer)
    if device.dispatch_seconds is None:
        moved = (3 + 2 * spec.state_tensors) * local_bytes
        return device.launch_seconds + moved / (device.bytes_per_s * device.efficiency.streaming)
    moved = spec.passes * local_bytes
    reached = reached_at(device.efficiency.in_place, moved // spec.calls)
    each = device.dispatch_seconds if ranks > 1 else device.launch_seconds
    once = device.parameter_seconds if ranks > 1 else 0.0
    found: Floats = once + spec.calls * each + moved / (device.bytes_per_s * reached)
    return np.asarray(found)


def update_bytes(optimizer: str, tiles: Sequence[int], *, together: bool = False) -> int:
    """Bytes beside parameters, gradients and state, for tiles of so many bytes each.

    `together` if the optimizer updates all of them at once (foreach).

    >>> update_bytes("adamw", [100, 300]), update_bytes("sgd", [100, 300])
    (600, 0)
    """
    spec = optimizer_spec(optimizer)
    if together:
        return spec.foreach_temporaries * sum(tiles)
    return spec.temporaries * max(tiles, default=0)
