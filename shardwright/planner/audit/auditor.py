"""Prices a strategy, single changes of it, and the best other uniform strategies."""

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
from shardwright.planner.audit.utilisation import useful_seconds
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.priced_frontier import Progress, strategies

_SAME = 1e-3  # relative differences of step time and memory below this are ignored
_ROUNDS = 8  # the most single changes that are applied one after the other
_SETTLED = 3  # the fastest strategies by the tables whose time and memory are simulated

Cost = tuple[Seconds, Bytes]
Allowed = Callable[[Strategy], Strategy | None]


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy and its plan, with simulated time and memory."""

    strategy: Strategy
    plan: Plan


@dataclass(frozen=True, slots=True)
class PricedChange:
    """A single change with its effect on time and memory.

    Attributes:
        change: the change.
        gain: the fraction of the step time that it saves; negative if the step gets slower.
        bytes: the additional peak memory of a rank by the tables; negative if it needs less.
        fits: whether the changed strategy is within the memory limit.
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
        optimizer: the name of the optimizer.
        tracer: traces the memory of single operator calls.
        limit: bytes per rank; None means no limit.
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
        """The plan that `sw.price` returns for a strategy; raises `StrategyError` as it does."""
        if strategy not in self._priced:
            plan = self._expansion.expanded(strategy).plan(0.0, ())
            self._priced[strategy] = Priced(strategy, self._refinement.settled(plan))
        return self._priced[strategy]

    def unsettled(self, strategy: Strategy) -> Plan:
        """The plan of a strategy by the tables; raises `StrategyError` as `price` does."""
        return self._expansion.expanded(strategy).plan(0.0, ())

    @cached_property
    def useful_seconds(self) -> float:
        """Seconds of a step's useful operations at the peak of one device."""
        analysis = self._expansion.sources.analysis
        return useful_seconds(self.graph, analysis, self.machine.device)

    def utilisation(self, plan: Plan) -> float:
        """Model FLOPs utilisation (MFU) of a plan on all of its devices."""
        return self.useful_seconds / (plan.step_seconds * plan.devices)

    def fits(self, peak_bytes: int) -> bool:
        """Whether `peak_bytes` are within the memory limit."""
        return self.limit is None or peak_bytes <= self.limit

    @paused()
    def changes(self, base: Priced) -> tuple[PricedChange, ...]:
        """Single changes of a priced strategy, in descending order of saved time.

        Changes that have no price, do not fit the model, or change neither time nor memory are
        omitted.
        """
        return tuple(sorted(self._changes(base), key=lambda one: (-one.gain, one.bytes)))

    def _changes(self, base: Priced) -> Iterator[PricedChange]:
        host = self.machine.levels[0].size
        seconds, peak = self._cost(base.strategy)
        seen: set[Cost] = set()  # lists changes of equal effect once, e.g. of `zero` and `dp_shard`
        for change in single_changes(base.strategy, self.limits, host):
            cost = self._cost_if_priced(change.strategy)
            if cost is None or cost in seen:
                continue
            seen.add(cost)
            gain, more = 1 - cost[0] / seconds, cost[1] - peak
            if abs(gain) > _SAME or abs(more) > _SAME * peak:
                yield PricedChange(change, gain, more, self.fits(base.plan.peak_bytes + more))

    def uniform(self, compiled: str, progress: Progress | None = None) -> Priced | None:
        """The fastest enumerated uniform strategy that fits in memory; None if none does.

        `compiled` is the value of that field in all enumerated strategies.
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
            starts: the strategies to start from; `allowed` is applied to each of them first.
            allowed: maps a strategy to the allowed one that replaces it (possibly itself), or to
                None if there is none.

        Returns:
            The fastest strategy found that fits; None if none fits.
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
        """The fastest by simulation that fits, among the fastest by the tables."""
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
        """The fastest by the tables among those that fit, or among all if none fits."""
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
