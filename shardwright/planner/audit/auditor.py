"""Prices a strategy, single changes of it, and the best uniform strategies beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from shardwright.ir.frontier import UNLIMITED, InfeasibleError
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import ModelLimits, Strategy
from shardwright.machine.model import Machine
from shardwright.planner.audit.changes import StrategyChange, single_changes
from shardwright.planner.audit.priced_as import priced_as
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier import Progress, strategies
from shardwright.planner.strategies.unpriced import dtypes_of
from shardwright.simulate.costs.useful_flop import useful_flop

_SAME = 1e-3  # of a step's time and memory: smaller differences are none
_ROUNDS = 8  # single changes after each other that are tried
_SETTLED = 3  # of the fastest by the tables, whose time and memory are simulated

Cost = tuple[Seconds, Bytes]
Allowed = Callable[[Strategy], Strategy | None]


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy and the plan that it is, with its memory simulated."""

    strategy: Strategy
    plan: Plan


@dataclass(frozen=True, slots=True)
class PricedChange:
    """A single change with what it buys.

    Attributes:
        change: the change.
        gain: the part of the step's time that it saves; below 0 it costs.
        bytes: how much more memory a rank needs at its peak, by the tables; below 0 it saves.
        fits: whether that is within the memory limit.
    """

    change: StrategyChange
    gain: float
    bytes: int
    fits: bool


@final
class Auditor:
    """Prices strategies of one graph on one machine.

    Args:
        graph: the model's graph.
        machine: the hardware.
        optimizer: its name.
        tracer: traces the memory of single operator calls.
        limit: bytes of a rank; None: no limit.
    """

    def __init__(
        self, graph: Graph, machine: Machine, optimizer: str, tracer: OpTracer, limit: int | None
    ) -> None:
        self.graph = graph
        self.machine = machine
        self.optimizer = optimizer
        self.limit = limit
        self._tracer = tracer
        self._expansion = Expansion(graph, machine, optimizer)
        self._costs: dict[Strategy, Cost] = {}
        self._priced: dict[Strategy, Priced] = {}

    @property
    def limits(self) -> ModelLimits:
        """Sizes of the model that limit degrees."""
        return self._expansion.limits

    @paused()
    def price(self, strategy: Strategy) -> Priced:
        """The plan of a strategy as `sw.price` has it; raises `StrategyError` as that does."""
        if strategy not in self._priced:
            plan = self._expansion.expanded(strategy).plan(0.0, ())
            self._priced[strategy] = Priced(strategy, self._refinement.settled(plan))
        return self._priced[strategy]

    def unsettled(self, strategy: Strategy) -> Plan:
        """The plan of a strategy by the tables; raises `StrategyError` as `price` does."""
        return self._expansion.expanded(strategy).plan(0.0, ())

    @cached_property
    def flop(self) -> int:
        """Operations of a step without recomputation."""
        return useful_flop(self.graph, self._expansion.sources.analysis)

    def utilisation(self, plan: Plan) -> float:
        """Model FLOPs utilisation: `flop` over what the devices could do meanwhile."""
        dtype = dtypes_of(self.graph)[0] or "float32"
        peak = self.machine.device.peak_flop_per_s(dtype) * plan.devices
        return self.flop / (plan.step_seconds * peak)

    def fits(self, peak_bytes: int) -> bool:
        """Whether so much is within the memory limit."""
        return self.limit is None or peak_bytes <= self.limit

    @paused()
    def changes(self, base: Priced) -> tuple[PricedChange, ...]:
        """Single changes of a priced strategy, the most time saved first.

        Left out are those that have no price, do not fit the model, or change neither time nor
        memory.
        """
        return tuple(sorted(self._changes(base), key=lambda one: (-one.gain, one.bytes)))

    def _changes(self, base: Priced) -> Iterator[PricedChange]:
        host = self.machine.levels[0].size
        seconds, peak = self._cost(base.strategy)
        seen: set[Cost] = set()  # two changes of one effect, as of `zero` and `dp_shard`, are one
        for change in single_changes(base.strategy, self.limits, host):
            cost = self._cost_if_priced(change.strategy)
            if cost is None or cost in seen:
                continue
            seen.add(cost)
            gain, more = 1 - cost[0] / seconds, cost[1] - peak
            if abs(gain) > _SAME or abs(more) > _SAME * peak:
                yield PricedChange(change, gain, more, self.fits(base.plan.peak_bytes + more))

    def uniform(self, compiled: str, progress: Progress | None = None) -> Priced | None:
        """The fastest uniform strategy of the enumeration that fits; None where none does.

        All are `compiled` alike, as that field of a strategy says.
        """
        frontier = strategies(
            self.graph,
            self.machine,
            self.optimizer,
            self._tracer,
            progress=progress,
            compiled=compiled,
        )
        try:
            best = frontier.fastest(UNLIMITED if self.limit is None else self.limit)
        except InfeasibleError:
            return None
        return Priced(Strategy.parse(best.name), best)

    @paused()
    def best_among(self, starts: Sequence[Strategy], allowed: Allowed) -> Priced | None:
        """The fastest strategy that fits, reached by single changes from `starts`.

        Args:
            starts: where to start; of those that are not allowed, single changes.
            allowed: of a strategy the one to take for it, which may be itself; None: none.

        Returns:
            The best that was found; None where none fits.
        """
        host = self.machine.levels[0].size
        found = [one for start in starts if (one := allowed(start)) is not None]
        if not found:
            near = (c.strategy for s in starts for c in single_changes(s, self.limits, host))
            found = [one for change in near if (one := allowed(change)) is not None]
        for _ in range(_ROUNDS):
            known = len(found)
            best = self._fastest(found)
            if best is None:
                break
            for change in single_changes(best, self.limits, host):
                one = allowed(change.strategy)
                if one is not None and one not in found:
                    found.append(one)
            if self._fastest(found) == best or len(found) == known:
                break
        return self._fastest_settled(found)

    def _fastest_settled(self, found: list[Strategy]) -> Priced | None:
        """The fastest that fits, of those that are fastest by the tables."""
        fitting: list[Priced] = []
        for _ in range(_SETTLED):
            best = self._fastest(found)
            if best is None:
                break
            found.remove(best)
            priced = self.price(best)
            if self.fits(priced.plan.peak_bytes):
                fitting.append(priced)
        return min(fitting, key=lambda one: one.plan.step_seconds, default=None)

    def _fastest(self, found: Sequence[Strategy]) -> Strategy | None:
        """The fastest by the tables, of those that fit if any does."""
        costs = {one: cost for one in found if (cost := self._cost_if_priced(one)) is not None}
        fitting = [one for one, cost in costs.items() if self.fits(cost[1])] or list(costs)
        return min(fitting, key=lambda one: costs[one], default=None)

    def _cost_if_priced(self, strategy: Strategy) -> Cost | None:
        if priced_as(strategy, self.graph)[1]:
            return None
        try:
            return self._cost(strategy)
        except StrategyError:
            return None

    def _cost(self, strategy: Strategy) -> Cost:
        """Seconds and bytes by the tables."""
        if strategy not in self._costs:
            candidate = self._expansion.expanded(strategy)
            cost = candidate.cost
            if self.machine.settles:  # then the times of the tables do not just add up
                cost = candidate.plan(0.0, ()).step_seconds, candidate.peak
            self._costs[strategy] = cost
        return self._costs[strategy]

    @cached_property
    def _refinement(self) -> Refinement:
        analysis = self._expansion.sources.analysis
        return Refinement(self.graph, self.machine, self.optimizer, self._tracer, analysis)
