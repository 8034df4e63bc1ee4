"""The uniform strategies that a search starts from, so that it never does worse than they do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from shardwright.ir.layout import Bytes
from shardwright.ir.options.constraints import ConstraintError, OnMesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.arguments import SearchScope
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.permitted import allowed_meshes
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.enumeration import strategies_on
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier import limited, priced
from shardwright.planner.strategies.roles import mesh_of, role_axes
from shardwright.solve.frontier.frontier_sampling import spaced

_MOST = 8  # candidates of a search


@final
@dataclass
class StartingStrategies:
    """Prices the strategies that the options of one search permit.

    Constraints other than those of the mesh are about single modules, which no uniform strategy
    keeps on purpose: under them, on meshes that are given, and for an exact frontier, there are no
    strategies to start from.
    """

    factory: SpaceFactory
    machine: Machine
    options: PlanOptions
    scope: SearchScope

    @property
    def are_wanted(self) -> bool:
        """Whether a search with these options starts from strategies."""
        shapes = all(isinstance(one, OnMesh) for one in self.options.constraints)
        return shapes and self.options.meshes is None and not self.options.exact

    def candidates(
        self, counts: Sequence[int], groups: Sequence[int], end: float
    ) -> list[Candidate]:
        """The best strategies, fastest first.

        Args:
            counts: numbers of micro-batches of plans without stages.
            groups: numbers of pipeline groups; 1 is no pipeline.
            end: the time limit, by the performance counter.
        """
        if not self.are_wanted or time.perf_counter() >= end:
            return []
        every = [one for one in self._every if self._is_permitted(one, counts, groups)]
        if not every:
            return []
        limit = limit_on(self.machine, self.options.memory_limit)
        most = self.machine.device.usable_bytes if limit is None else limit
        found = priced(self._expansion, every, limits=(most,), end=end)
        return _best(found, Bytes(int(most)))

    @cached_property
    def _expansion(self) -> Expansion:
        optimizer = self.options.optimizer
        return Expansion(self.factory.graph, self.machine, optimizer, self.factory)

    @cached_property
    def _every(self) -> list[Strategy]:
        kept_to = limited(self._expansion, tp_across_hosts=False)
        return list(strategies_on(self.machine, kept_to))

    def _is_permitted(
        self, strategy: Strategy, counts: Sequence[int], groups: Sequence[int]
    ) -> bool:
        if strategy.pp not in groups:
            return False
        if strategy.recompute.kind != "none" and not self.options.recompute:
            return False
        given = self.options.counts not in (None, (1,))
        if (strategy.pp == 1 or given) and strategy.micro_batches not in counts:
            return False
        shapes = self._shapes(strategy.pp)
        return shapes is None or mesh_of(role_axes(strategy)).shape in shapes

    def _shapes(self, groups: int) -> set[tuple[int, ...]] | None:
        """The shapes of meshes that the constraints permit; None where they permit all."""
        wanted = self.options.constraints
        if not wanted:
            return None
        try:
            meshes = allowed_meshes(self.machine.devices // groups, wanted, groups=groups)
        except ConstraintError:
            return set()
        return {tuple(size for size in mesh.shape if size > 1) or (1,) for mesh in meshes}


def _best(found: Sequence[Candidate], limit: Bytes) -> list[Candidate]:
    """All that are as fast as the fastest that fits, as simulated memory is less; then smaller."""
    if not found:
        return []
    front = spaced(found, [one.cost for one in found], len(found), 0.0)
    fitting = sum(one.peak > limit for one in front) + 1  # up to the first that fits
    first = front[max(0, fitting - _MOST) : fitting]
    return [*first, *front[fitting : fitting + _MOST - len(first)]]
