"""Seconds of redistributions between all layouts of a tensor, kept for tensors that are alike."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.layout import Atoms, Mesh
from shardwright.planner.tables.layout_codes import Ints, layouts_of, most_layouts
from shardwright.planner.tables.objective import Objective

Floats = NDArray[np.float64]

_LAYOUTS_AT_ONCE = 150  # above this, only requested layouts are priced
_LAYOUTS_LISTED = 5_000  # feasible or not; above this, layouts are not enumerated


@final
class Matrices:
    """Prices redistributions on `mesh` by `measure`."""

    def __init__(self, measure: Objective, mesh: Mesh) -> None:
        self._measure, self._mesh = measure, mesh
        self._known: dict[tuple[Atoms, int], tuple[Ints, Floats]] = {}
        self._unique: dict[bytes, tuple[Ints, Ints]] = {}

    def distinct(self, codes: Ints) -> tuple[Ints, Ints]:
        """The unique codes, sorted, and the index of each of `codes` among them."""
        key = codes.tobytes()
        if key not in self._unique:
            self._unique[key] = np.unique(codes, return_inverse=True)
        return self._unique[key]

    def between(self, atoms: Atoms, item: int, sources: Ints, targets: Ints) -> Floats:
        """Seconds between all pairs of layouts: (S,), (T,) -> (S, T).

        Values of the same atoms and dtype share one matrix of all layouts that they may have.
        """
        known, seconds = self._listed(atoms, item)
        if known.size:
            rows, columns = np.searchsorted(known, sources), np.searchsorted(known, targets)
            return seconds[rows[:, None], columns]
        source, to_source = self.distinct(sources)
        target, to_target = self.distinct(targets)
        src, dst = np.repeat(source, len(target)), np.tile(target, len(source))
        priced = self._measure.redistributions(atoms, item, src, dst)
        return priced.reshape(len(source), len(target))[to_source[:, None], to_target]

    def pairs(self, atoms: Atoms, item: int, sources: Ints, targets: Ints) -> Floats:
        """Seconds from each of `sources` to the same entry of `targets`: (N,), (N,) -> (N,)."""
        known, seconds = self._listed(atoms, item)
        if known.size:
            return seconds[np.searchsorted(known, sources), np.searchsorted(known, targets)]
        return self._measure.redistributions(atoms, item, sources, targets)

    def _listed(self, atoms: Atoms, item: int) -> tuple[Ints, Floats]:
        """All layouts of such tensors and the seconds between them; empty if there are too many."""
        if (atoms, item) not in self._known:
            few = np.zeros(0, np.int64)
            if most_layouts(atoms, self._mesh) <= _LAYOUTS_LISTED:
                known = np.sort(layouts_of(atoms, self._mesh))
                few = known if len(known) <= _LAYOUTS_AT_ONCE else few
            src, dst = np.repeat(few, len(few)), np.tile(few, len(few))
            seconds = self._measure.redistributions(atoms, item, src, dst)
            self._known[atoms, item] = few, seconds.reshape(len(few), len(few))
        return self._known[atoms, item]
