"""The cost that parameters save, and add, by being communicated in buckets.

Gradients that are only summed share a buffer, and so do copies that are gathered and the gradients
that are scattered again (`program/step/passes/bucket.py`). Each pays of its bucket's launch the
part of the bucket that it fills, so that a full bucket pays for one. As no bucket is more than
full, that is never more than what the launches of a plan's buckets take.
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
    """Bytes of a parameter's tile in each layout it may be stored in, (Ks,), and read in, (Kt,).

    Its gradient has `gradient_ratio` times as many.
    """

    stored: Ints
    read: Ints
    gradient_ratio: int


class Saved(NamedTuple):
    """Seconds less than alone, each (Ks, Kt), once each.

    Of the gather of a copy, of its gradient scattered again, and of a gradient's sum, which
    micro-batches make once for all of them.
    """

    forward: Floats
    scattered: Floats
    summed: Floats

    def of(self, phase: Phase, *, each: bool, once: bool) -> Floats:
        """What a transfer saves: one of `each` micro-batch, or one for all, `once`, or both."""
        if phase is not Phase.BACKWARD:
            return self.forward
        return self.scattered * each + self.summed * once


@final
class Bucketing:
    """Prices what shares buckets of `sizes`."""

    def __init__(self, measure: Objective, sizes: BucketSizes, axes: int) -> None:
        self._measure, self._sizes, self._axes = measure, sizes, axes
        self._sum = measure.launches(Collective.ALL_REDUCE)
        self._gather = measure.launches(Collective.ALL_GATHER)
        self._scatter = measure.launches(Collective.REDUCE_SCATTER)

    def sums(self, sources: Ints, wanted: Ints, grads: Ints, sizes: Sizes) -> Saved:
        """Of gradients that are summed and nothing else, of parameters read as they are stored.

        `wanted` and `grads` are codes of the layouts that are read, and that gradients come in.
        """
        source, grad = self._pairs(sources, grads)
        summed = (grad == SUMS) & (source == WHOLE)
        only = (summed | (grad == source)).all(axis=2) & (sources[:, None] == wanted)
        part = np.minimum(1.0, sizes.stored * sizes.gradient_ratio / self._sizes.sums)
        launches: Floats = (summed * self._sum).sum(axis=2)
        saved = np.where(only, launches * (1 - part)[:, None], 0.0)
        nothing = np.zeros(saved.shape)
        return Saved(nothing, nothing, saved)

    def gathers(self, sources: Ints, wanted: Ints, grads: Ints, sizes: Sizes) -> Saved:
        """Of copies gathered along one axis, and gradients scattered along it.

        Tiles are joined and copies cut out again, which takes passes over memory. What travels
        alone, cut along the first dimension, needs neither.
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
        joined = np.where(
            alone, 0.0, self._measure.packed(2 * sizes.read * sizes.gradient_ratio, 1)
        )
        scattered = (opened * self._scatter).sum(axis=2) * (1 - share) - joined
        sums = (summed * self._sum).sum(axis=2) * (1 - share)
        forward, scattered, sums = (np.where(eligible, x, 0.0) for x in (forward, scattered, sums))
        return Saved(forward, scattered, sums)

    def _gathered(self, sources: Ints, wanted: Ints, grads: Ints) -> tuple[Bools, Bools, Bools]:
        """Which pairs are gathered so, (Ks, Kt), along which axis, and summed over which others."""
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
        """Digits of both, which broadcast to (Ks, Kt, axes)."""
        return digits(sources, self._axes)[:, None], digits(others, self._axes)[None]
