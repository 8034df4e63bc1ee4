"""Seconds that bucketed communication of parameters and gradients saves, and adds.

All-reduces of gradients are bucketed, and so are all-gathers of parameters and reduce-scatters of
their gradients (`program/step/passes/bucket.py`). Each parameter pays for a launch in proportion to
the part of a bucket that it fills, so that a full bucket pays for one launch. As buckets are at
most full, the sum is never more than the launches of a plan's buckets.
"""

from __future__ import annotations

from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.plan import Phase
from shardwright.ir.redistribution import Collective
from shardwright.planner.tables.layout_codes import FIRST_ATOM, SUMS, WHOLE, Ints, digits
from shardwright.planner.tables.memory import BucketSizes
from shardwright.planner.tables.objective import Objective

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Sizes(NamedTuple):
    """Bytes of a parameter's tile in each stored layout, (Ks,), and in each layout read, (Kt,).

    The gradient has `gradient_ratio` times as many bytes.
    """

    stored: Ints
    read: Ints
    gradient_ratio: int


class BucketSavings(NamedTuple):
    """Seconds that one message saves by sharing a bucket instead of being sent alone: (Ks, Kt).

    Attributes:
        forward: of the all-gather of a parameter.
        scattered: of the reduce-scatter of its gradient.
        summed: of the all-reduce of a gradient, which all micro-batches share.
    """

    forward: Floats
    scattered: Floats
    summed: Floats

    def of(self, phase: Phase, *, each: bool, once: bool) -> Floats:
        """Seconds saved by a transfer in `each` micro-batch, `once` per step, or both."""
        if phase is not Phase.BACKWARD:
            return self.forward
        return self.scattered * each + self.summed * once


@final
class Bucketing:
    """Prices messages that share buckets of `sizes`."""

    def __init__(self, measure: Objective, sizes: BucketSizes, axes: int) -> None:
        self._measure, self._sizes, self._axes = measure, sizes, axes
        self._sum = measure.launches(Collective.ALL_REDUCE)
        self._gather = measure.launches(Collective.ALL_GATHER)
        self._scatter = measure.launches(Collective.REDUCE_SCATTER)

    def sums(self, sources: Ints, wanted: Ints, grads: Ints, sizes: Sizes) -> BucketSavings:
        """Savings of gradients that need only an all-reduce (parameters read in their own layout).

        Args:
            sources: codes of the stored layouts, (Ks,).
            wanted: codes of the layouts that are read, (Kt,).
            grads: codes of the layouts of the gradients, (Kt,).
            sizes: bytes of the tiles.
        """
        source, grad = self._pairs(sources, grads)
        summed = (grad == SUMS) & (source == WHOLE)
        only = (summed | (grad == source)).all(axis=2) & (sources[:, None] == wanted)
        part = np.minimum(1.0, sizes.stored * sizes.gradient_ratio / self._sizes.sums)
        launches: Floats = (summed * self._sum).sum(axis=2)
        saved = np.where(only, launches * (1 - part)[:, None], 0.0)
        nothing = np.zeros(saved.shape)
        return BucketSavings(nothing, nothing, saved)

    def gathers(self, sources: Ints, wanted: Ints, grads: Ints, sizes: Sizes) -> BucketSavings:
        """Savings of parameters that are gathered along one axis and their gradients.

        A bucket packs tiles and unpacks copies, which reads and writes memory; a single message
        along the first dimension needs neither. Arguments are as in `sums`.
        """
        eligible, opened, summed = self._gathered(sources, wanted, grads)
        source, _ = self._pairs(sources, wanted)
        least = self._measure.alone_bytes
        large = np.full(sizes.read.shape, False) if least is None else sizes.read >= least
        alone = large & (opened & (source == FIRST_ATOM)).any(axis=2)
        share = np.where(alone, 1.0, np.minimum(1.0, sizes.read / self._sizes.gathers))
        moved = 2 * (sizes.stored[:, None] + sizes.read)
        packed = np.where(share < 1, self._measure.packed(moved, 2), 0.0)
        forward = (opened * self._gather).sum(axis=2) * (1 - share) - packed
        joined = self._measure.packed(2 * sizes.read * sizes.gradient_ratio, 1)
        joined = np.where(share < 1, joined, 0.0)  # its gradient fills a bucket alone, too
        scattered = (opened * self._scatter).sum(axis=2) * (1 - share) - joined
        sums = (summed * self._sum).sum(axis=2) * (1 - share)
        forward, scattered, sums = (np.where(eligible, x, 0.0) for x in (forward, scattered, sums))
        return BucketSavings(forward, scattered, sums)

    def _gathered(self, sources: Ints, wanted: Ints, grads: Ints) -> tuple[Bools, Bools, Bools]:
        """The pairs that are gathered, (Ks, Kt), the axis of each, and the axes that are summed."""
        source, target = self._pairs(sources, wanted)
        _, grad = self._pairs(sources, grads)
        opened = (source >= FIRST_ATOM) & (target == WHOLE)
        summed = (grad == SUMS) & (source == WHOLE)
        along = np.where(opened, grad == SUMS, (target == source) & (summed | (grad == source)))
        twice = (opened[..., None] & (source[..., None] == source[..., None, :])).sum(
            axis=(2, 3)
        ) > 1
        return along.all(axis=2) & (opened.sum(axis=2) == 1) & ~twice, opened, summed

    def _pairs(self, sources: Ints, others: Ints) -> tuple[Ints, Ints]:
        """Digits of both codes, which broadcast to (Ks, Kt, axes)."""
        return digits(sources, self._axes)[:, None], digits(others, self._axes)[None]
