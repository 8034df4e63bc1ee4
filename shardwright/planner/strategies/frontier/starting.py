"""The uniform strategies that a search starts from, so that it never does worse than they do."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from shardwright.ir.layout import Bytes
from shardwright.ir.options.constraints import Constraint, Forbid, Pin
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.schedules.zero_bubble_v import ZBV_ZERO_BUBBLE
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.model import Machine
from shardwright.planner.arguments import SearchScope
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.permitted import broken, keeps, permits_mesh
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.space.constrain import hits
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.enumeration import rescheduled, strategies_on
from shardwright.planner.strategies.frontier.priced_frontier import (
    RESOLUTION,
    SharedSpaces,
    Until,
    limited,
    priced,
)
from shardwright.planner.strategies.frontier.union import AroundStrategies, around
from shardwright.planner.strategies.roles import mesh_of, role_axes
from shardwright.planner.strategies.tilings import Tilings
from shardwright.rules.naming import dimension_names
from shardwright.rules.rule import Tiling
from shardwright.solve.frontier.frontier_sampling import spaced

_PATIENCE = 20  # strategies in a row that may be no better than those before
_ZBV_PATIENCE = 10  # the same of pipelines under ZB-V, whose bounds exclude less
_RESCHEDULED = 2  # of the best pipelines, that are tried under every schedule
_MOST = 8  # candidates of a search
_MOST_PIPELINES = 4  # candidates with stages, beside those
_MOST_MESHES = 4  # of three and four axes, and of pipelines, around them


@final
@dataclass
class StartingStrategies:
    """Prices the strategies that the options of one search permit.

    Only strategies that keep the constraints are priced. If meshes are given, or the frontier is
    exact, the search does not start from strategies.
    """

    factory: SpaceFactory
    machine: Machine
    options: PlanOptions
    scope: SearchScope

    def with_optimizer(self, name: str) -> StartingStrategies:
        """The same strategies with the state of the optimizer where its name says."""
        if name == self.options.optimizer:
            return self
        options = replace(self.options, optimizer=name)
        return StartingStrategies(self.factory, self.machine, options, self.scope)

    @property
    def are_wanted(self) -> bool:
        """Whether a search with these options starts from strategies."""
        return self.options.meshes is None and not self.options.exact

    def candidates(
        self, counts: Sequence[int], groups: Sequence[int], known: float, end: float
    ) -> list[Candidate]:
        """The best strategies, fastest first.

        Args:
            counts: numbers of micro-batches of plans without stages.
            groups: numbers of pipeline groups; 1 is no pipeline.
            known: seconds of a strategy of another form of the graph that fits; slower ones are
                left out.
            end: the time limit, by the performance counter.
        """
        if not self.are_wanted or time.perf_counter() >= end:
            return []
        every = [one for one in self._every if self._is_permitted(one, counts, groups)]
        if not every:
            return []
        limit = limit_on(self.machine, self.options.memory_limit)
        most = self.machine.device.usable_bytes if limit is None else limit
        shared = self._shared
        until = Until(end, known, _PATIENCE)
        found = priced(self._expansion, every, limits=(most,), until=until, shared=shared)
        kept = [one for one in found if not self._broken(one)]
        return _best(kept, Bytes(int(most)))

    def pipelines(
        self, counts: Sequence[int], groups: Sequence[int], best: float, end: float
    ) -> list[Candidate]:
        """The best strategies in stages under 1F1B that fit, all clearly faster than `best`.

        The other arguments are those of `candidates`.
        """
        found = self._pipelines(self._staged(counts, groups), best, end, _PATIENCE)
        return found[:_MOST_PIPELINES]

    def rescheduled(
        self,
        plain: Sequence[Candidate],
        counts: Sequence[int],
        groups: Sequence[int],
        best: float,
        end: float,
    ) -> list[Candidate]:
        """The best strategy in stages under each other schedule, faster than `plain` and `best`.

        All strategies are tried under ZB-V, whose bubble is the smallest. Interleaved schedules,
        which may need fewer messages or less memory, are tried with the best two of these and of
        `plain`, which are from `pipelines`. The other arguments are those of `pipelines`.
        """
        best = min([best, *(one.point.time for one in plain)])
        layers = len(self._expansion.layers)
        staged = [
            replace(one, schedule=ZBV_ZERO_BUBBLE.name, virtual_stages=2)
            for one in self._staged(counts, groups)
            if 2 * one.pp <= layers
        ]
        found = self._pipelines(staged, best, end, _ZBV_PATIENCE)
        first = dict.fromkeys(
            Strategy.parse(one.name) for one in (*plain[:_RESCHEDULED], *found[:_RESCHEDULED])
        )
        others = dict.fromkeys(
            other
            for one in first
            for other in rescheduled(one, layers)
            if schedule_named(other.schedule).tried
        )
        left = [one for one in others if str(one) not in {known.name for known in found}]
        found += self._pipelines(left, best, end, len(left))
        fastest: dict[str, Candidate] = {}
        for one in sorted(found, key=lambda one: one.cost):
            assert one.staged is not None
            fastest.setdefault(one.staged.schedule, one)
        return list(fastest.values())[:_MOST_PIPELINES]

    def _staged(self, counts: Sequence[int], groups: Sequence[int]) -> list[Strategy]:
        """The strategies in stages that the options permit."""
        return [
            one for one in self._every if one.pp > 1 and self._is_permitted(one, counts, groups)
        ]

    def _pipelines(
        self, every: Sequence[Strategy], best: float, end: float, patience: int
    ) -> list[Candidate]:
        """The strategies that fit and are clearly faster than `best`, fastest first."""
        if not every or time.perf_counter() >= end:
            return []
        limit = limit_on(self.machine, self.options.memory_limit)
        most = math.inf if limit is None else limit
        found = priced(
            self._expansion,
            every,
            limits=(most,),
            until=Until(end, best, patience),
            reschedule=False,
            shared=self._shared,
        )
        faster = [c for c in found if c.peak <= most and c.point.time * (1 + RESOLUTION) < best]
        return sorted(faster, key=lambda one: one.cost)

    def around(self, best: Sequence[Candidate]) -> list[AroundStrategies]:
        """The spaces to search around `best`, which are from `candidates`.

        There are none under constraints, which these spaces do not keep.
        """
        if self.options.constraints:
            return []
        strategies = [Strategy.parse(one.name) for one in best]
        return list(around(strategies, self._expansion.known_dimensions, _MOST_MESHES))

    @cached_property
    def _expansion(self) -> Expansion:
        """The expansion, without constraints: axis names would restrict strategies too much."""
        graph, factory = self.factory.graph, self.factory
        if self.options.constraints:
            factory = SpaceFactory(graph, recompute=False)
        return Expansion(graph, self.machine, self.options.optimizer, factory)

    @cached_property
    def _shared(self) -> SharedSpaces:
        return SharedSpaces(self._expansion)

    def _broken(self, candidate: Candidate) -> tuple[Constraint, ...]:
        """The constraints on modules that a priced strategy breaks."""
        marks = replace(self.factory.marks, meshes=frozenset(), caps_roles=False)
        if not marks.of:
            return ()
        writer, tilings = candidate.writer, dict[str, Tiling]()
        model = writer.space.model
        for _, like, chosen, _ in writer.options_chosen(candidate.point.choice):
            rule = model.analysis.rules[like.name]
            tilings[like.name] = model.options(like).tiling(rule, chosen)
        storage = writer.layouts(candidate.point.choice)
        wanted = [c for c in self.options.constraints if isinstance(c, Pin | Forbid)]
        return broken(wanted, marks, writer.short.stands_for, model, tilings, storage)

    @cached_property
    def _every(self) -> list[Strategy]:
        kept_to = limited(self._expansion, tp_across_hosts=False)
        numerics = self.factory.graph.numerics
        offload = optimizer_spec(self.options.optimizer).offload
        return [
            one.in_form(numerics).but(offload=offload)
            for one in strategies_on(self.machine, kept_to)
        ]

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
        wanted, axes = self.options.constraints, role_axes(strategy)
        if wanted and not permits_mesh(wanted, mesh_of(strategy, axes), strategy.pp):
            return False
        return not (axes and self.factory.marks.of) or self._keeps(strategy)

    def _keeps(self, strategy: Strategy) -> bool:
        """Whether operators keep pins and prohibitions, before the strategy is priced."""
        axes, analysis = role_axes(strategy), self._expansion.sources.analysis
        tilings = Tilings(strategy, axes, self._expansion.known_dimensions)
        marks, seen = self.factory.marks, set[object]()
        for op in self.factory.graph.ops:
            numbers, rule = marks.of.get(op.name, ()), analysis.rules[op.name]
            if not numbers or (id(rule), numbers) in seen:
                continue
            seen.add((id(rule), numbers))
            choices = tilings.wanted(op, rule, self._expansion.dimensions)
            for number in numbers:
                constraint, along = marks.statements[number]
                meant = hits(along, rule, self._names)
                does = [choice in meant for choice in choices]
                mesh = mesh_of(strategy, axes)
                if meant and not keeps(constraint, along, mesh, does, whole=0 in meant):
                    return False
        return True

    @cached_property
    def _names(self) -> dict[int, str]:
        return dimension_names(self.factory.graph, self._expansion.sources.analysis)


def _best(found: Sequence[Candidate], limit: Bytes) -> list[Candidate]:
    """Candidates at least as fast as the fastest that fits, then those of less memory.

    The faster ones may fit too, because simulated memory is less than additive memory.
    """
    if not found:
        return []
    front = spaced(found, [one.cost for one in found], len(found), 0.0)
    fitting = sum(one.peak > limit for one in front) + 1  # up to the first that fits
    first = front[max(0, fitting - _MOST) : fitting]
    return [*first, *front[fitting : fitting + _MOST - len(first)]]
