"""Seconds of the optimizer's update of a parameter, and where its state is."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import final

import numpy as np

from shardwright.ir.graph import Graph, Tensor
from shardwright.ir.layout import Mesh
from shardwright.ir.options.mixed_precision import MASTER, master_weights
from shardwright.ir.options.optimizers import optimizer_spec, placed
from shardwright.planner.tables.objective import Objective
from shardwright.simulate.costs.workload import Floats, Ints


@final
class UpdateTables:
    """Prices updates of the parameters of `graph` on `mesh` by `measure`."""

    def __init__(self, graph: Graph, mesh: Mesh, measure: Objective, optimizer: str) -> None:
        self.optimizer, self.spec = optimizer, optimizer_spec(optimizer)
        self._graph, self._mesh, self._measure = graph, mesh, measure

    def stored(self, name: str) -> Tensor:
        """A parameter, whole, in the dtype that it is stored in."""
        tensor = self._graph.tensor[name]
        return replace(tensor, dtype=MASTER) if name in master_weights(self._graph) else tensor

    def seconds(self, name: str, tile_bytes: Ints) -> Floats:
        """Seconds of the update of tiles of a parameter as tables count it: (K,)."""
        return self._measure.update(tile_bytes, self._priced, self.stored(name))

    def seconds_on_device(self, name: str, tile_bytes: Ints) -> Floats:
        """Seconds of such an update on the device, with the state there already: (K,)."""
        return self._measure.update(tile_bytes, placed(self.optimizer, ()), self.stored(name))

    @cached_property
    def _priced(self) -> str:
        """The name of the optimizer by which updates are priced.

        Of an update with copies of state, the longer of both in total, on even shares: a step takes
        as long as either, so that no plan is faster than its table.
        """
        on_device = placed(self.optimizer, ())
        if self.spec.by_host:
            return self.optimizer
        if not self.spec.on_host:
            return on_device
        totals = {on_device: 0.0, self.optimizer: 0.0}
        for name in self._graph.trained:
            whole = self.stored(name)
            share = np.array([-(-whole.bytes // self._mesh.size)], np.int64)
            for one in totals:
                totals[one] += float(self._measure.update(share, one, whole)[0])
        return max(totals, key=lambda one: totals[one])
