"""Seconds of an optimizer's update of one parameter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.machine.model import Device
from shardwright.planner.tables.memory import state_tensors
from shardwright.simulate.costs.compute import reached_at
from shardwright.simulate.costs.workload import Floats, Ints


class Update(NamedTuple):
    """What torch runs, parameter by parameter: operators, and reads and writes of its elements."""

    calls: int
    passes: int


# Counted with torch 2.13, after the first step; a test counts again.
UPDATES = {
    "sgd": Update(1, 3),
    "momentum": Update(3, 8),
    "sgd_momentum": Update(3, 8),
    "adam": Update(7, 19),
    "adamw": Update(8, 21),
    "nadam": Update(8, 23),
    "radam": Update(12, 29),
    "adamax": Update(6, 17),
    "adagrad": Update(4, 12),
    "rmsprop": Update(5, 14),
}


def update_seconds(held: Ints, optimizer: str, device: Device, ranks: int) -> Floats:
    """Seconds to update tiles of `held` bytes, and to bring them in and their gradients back: (K,).

    Where nobody measured what an operator on a stored parameter costs (`Device.dispatch_seconds`),
    the update is taken for one kernel that reads weight, gradient and state once, and writes weight
    and state. Parameters of a single rank are plain tensors, whose operators only are launched.
    """
    if device.dispatch_seconds is None:
        moved = (3 + 2 * state_tensors(optimizer)) * held
        return device.launch_seconds + moved / (device.bytes_per_s * device.efficiency.streaming)
    calls, passes = UPDATES[optimizer.lower()]
    moved = passes * held
    reached = reached_at(device.efficiency.in_place, moved // calls)
    each = device.dispatch_seconds if ranks > 1 else device.launch_seconds
    once = device.parameter_seconds if ranks > 1 else 0.0
    found: Floats = once + calls * each + moved / (device.bytes_per_s * reached)
    return np.asarray(found)
