"""Searches several meshes at once that a search is about to take one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, final

from shardwright.planner.plans.mesh_frontier import approximate
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.processes.forked_map import ForkedMap
from shardwright.solve.frontier.fast import FastFrontier
from shardwright.solve.frontier.sweep import DualBound


class Ahead(NamedTuple):
    """The plan builder of a mesh, and its approximate frontier, if that was computed."""

    writer: PlanBuilder
    frontier: FastFrontier | None


@final
class MeshesAhead:
    """Frontiers of meshes that were searched in at most `processes` processes, by their keys.

    Plan builders know the transient memory of their points then.
    """

    def __init__(self, processes: int) -> None:
        self._map = ForkedMap(processes)
        self._found: dict[Hashable, Ahead] = {}

    @property
    def is_useful(self) -> bool:
        """Whether there are several processes."""
        return self._map.processes > 1

    def search(
        self,
        writers: Sequence[tuple[Hashable, PlanBuilder]],
        wanted: Callable[[PlanBuilder, DualBound], bool],
        end: float,
        points: int,
    ) -> None:
        """Search these meshes for `points` each until the time `end`, by the performance counter.

        `wanted` tells whether points in gaps may be asked for, by the lower bound of a mesh.
        """

        def searched(one: tuple[Hashable, PlanBuilder]) -> tuple[FastFrontier, list[int]]:
            writer = one[1]
            left = end - time.perf_counter()
            asked = partial(wanted, writer)
            found = approximate(writer.space, left, asked, points=points)
            return found, writer.transients.of([point.choice for point in found.points])

        self._found = {}
        for (key, writer), found in zip(writers, self._map(searched, writers), strict=True):
            frontier, transients = found or (None, ())
            self._found[key] = Ahead(writer, frontier)
            if frontier is not None:
                choices = (point.choice for point in frontier.points)
                writer.transients.known.update(zip(choices, transients, strict=True))

    def take(self, key: Hashable) -> Ahead | None:
        """Remove and return what was found of a mesh; None if it was not searched."""
        return self._found.pop(key, None)
