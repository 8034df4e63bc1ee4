"""Computes seconds of copies in a device's memory: of parameters, and into and out of buckets."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.machine.model import Device

Amount = TypeVar("Amount", float, NDArray[np.float64])


def copy_seconds(moved: Amount, times: int, device: Device) -> Amount:
    """Seconds of `times` kernels, each of which reads and writes `moved` bytes in all."""
    streamed = device.bytes_per_s * device.efficiency.streaming
    return times * (device.launch_seconds + moved / streamed)


def packing_seconds(moved: Amount, handled: int, device: Device) -> Amount:
    """Seconds to put a tile into a bucket, and with `handled` 2 also to take its copy out.

    It is priced as one kernel that reads and writes `moved` bytes in all, or with the measured
    seconds of each (`Device.packing_seconds`) instead of its launch if these are more.
    """
    each = device.packing_seconds
    if each is None:
        return copy_seconds(moved, 1, device)
    more = max(0.0, handled * each - device.launch_seconds)
    return copy_seconds(moved, 1, device) + more
