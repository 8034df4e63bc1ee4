"""Devices to which a token goes over the experts that it has chosen."""

from __future__ import annotations

from math import comb

import numpy as np
from numpy.typing import NDArray

from shardwright.rules.mixtures.group_limits import ANY, GroupLimit

Floats = NDArray[np.float64]


def visited_share(experts: int, chosen: int, devices: Floats, limit: GroupLimit = ANY) -> Floats:
    """Devices that a token visits over the experts that it has chosen: (K,).

    `devices` (K,) share the experts evenly, neighbours on one device, and every choice of `chosen`
    experts in the groups of `limit` is as likely.

    >>> visited_share(128, 8, np.array([1.0, 8.0, 64.0])).round(3)
    array([0.125, 0.667, 0.972])
    >>> visited_share(128, 8, np.array([1.0, 8.0, 64.0]), GroupLimit(8, 4)).round(3)
    array([0.125, 0.457, 0.944])
    """
    found = {count: _visited(experts, chosen, count, limit) for count in np.unique(devices)}
    share: Floats = np.array([found[count] for count in devices]) / chosen
    return share


def _visited(experts: int, chosen: int, devices: float, limit: GroupLimit) -> float:
    """The devices that a token visits on average."""
    size, here = experts // limit.groups, experts / devices
    among = limit.chosen * size  # experts that a token chooses from

    def missed(theirs: float) -> float:
        """The part of tokens that choose none of so many of these experts."""
        drawn = np.arange(chosen)
        return float((np.maximum(0.0, among - theirs - drawn) / (among - drawn)).prod())

    if here <= size:
        part = limit.chosen / limit.groups  # of tokens that choose the group of a device
        return devices * part * (1.0 - missed(here))
    whole, left = round(here / size), limit.groups - round(here / size)
    ways = comb(limit.groups, limit.chosen)
    return devices * sum(
        comb(whole, n) * comb(left, limit.chosen - n) / ways * (1.0 - missed(n * size))
        for n in range(limit.chosen + 1)
    )
