"""Rows of the busiest device, where devices hold different experts."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

# Rows of the busiest device over the mean, on any number of devices; or rows of each expert.
ExpertSkew = float | tuple[float, ...]


def wrong_skew(skew: ExpertSkew) -> str:
    """Says what to change in a figure that is not possible; empty for one that is."""
    if not isinstance(skew, tuple):
        if 1 <= skew < inf:
            return ""
        return (
            f"expert_skew is {skew}; give the rows of the busiest device over the mean, at least 1"
        )
    if all(0 <= rows < inf for rows in skew) and any(skew):
        return ""
    return f"expert_skew is {list(skew)}; give rows of experts, not negative and not all 0"


def busiest_share(skew: ExpertSkew, owned: NDArray[np.float64]) -> NDArray[np.float64]:
    """The share of rows of the busiest device, by the share of experts that one has (`owned`).

    Devices hold experts that follow each other. Rows of another number of experts than the model
    has are those of as many groups of neighbours, within which all experts have as many.

    >>> busiest_share((4.0, 2.0, 1.0, 1.0), np.array([0.25, 0.5, 1.0]))
    array([0.5 , 0.75, 1.  ])
    >>> busiest_share(1.25, np.array([0.25, 0.5, 1.0]))
    array([0.3125, 0.625 , 1.    ])
    """
    if not isinstance(skew, tuple):
        return np.where(owned < 1.0, np.minimum(1.0, owned * skew), owned)
    before = np.cumsum((0.0, *skew)) / sum(skew)
    places = np.linspace(0.0, 1.0, len(before))
    found = [_largest(before, places, share) for share in owned.ravel().tolist()]
    return np.array(found).reshape(owned.shape)


def busiest_over_mean(skew: ExpertSkew, owned: float) -> float:
    """Rows of the busiest device over those that it would have if all experts had as many.

    >>> busiest_over_mean((4.0, 2.0, 1.0, 1.0), 0.5), busiest_over_mean(1.25, 0.5)
    (1.5, 1.25)
    """
    if not isinstance(skew, tuple):
        return skew
    return float(busiest_share(skew, np.array(owned)) / owned)


def _largest(before: NDArray[np.float64], places: NDArray[np.float64], share: float) -> float:
    ends = np.minimum(1.0, np.arange(np.ceil(1 / share - 1e-9) + 1) * share)
    return float(np.diff(np.interp(ends, places, before)).max())
