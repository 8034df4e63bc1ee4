"""Prices a strategy, single changes of it, and the best other uniform strategies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import final

from shardwright.ir.frontier import UNLIMITED, InfeasibleError
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.optimizers import OptimizerError
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.fields import chunks_of
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import ModelLimits, Strategy
from shardwright.machine.model import Machine
from shardwright.planner.audit.beyond import plans_like
from shardwright.planner.audit.changes import StrategyChange, single_changes
from shardwright.planner.audit.loss_forms import PricedForms
from shardwright.planner.audit.priced_as import priced_as
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.searched_frontier import LEAST_SHARE
from shardwright.planner.strategies.expansion import marked
from shardwright.planner.strategies.form import recipe_for
from shardwright.planner.strategies.frontier.priced_frontier import Progress, strategies_of

_SAME = 1e-3  # relative differences of step time and memory below this are ignored
_GAIN = 5e-3  # of a step's time: single changes that save less are not simulated
_SIMULATED = 6  # single changes, at most
_HIDING = "async_tp", "ep_overlap"  # fields of messages beside operators
_SIMULATED_FIELDS = "offload", *_HIDING  # which change no table
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
        bytes: the additional peak memory of a rank; negative if it needs less.
        fits: whether the changed strategy is within the memory limit.
        is_simulated: whether time and memory are those of its step program, else of the tables.
    """

    change: StrategyChange
    gain: float
    bytes: int
    fits: bool
    is_simulated: bool


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
        self._forms = PricedForms(graph, machine, optimizer, tracer)
        self._costs: dict[Strategy, Cost] = {}
        self._plans: dict[Strategy, Plan] = {}  # by the tables
        self._priced: dict[Strategy, Priced] = {}

    @property
    def limits(self) -> ModelLimits:
        """Sizes of the model that limit degrees."""
        return self._forms.given.expansion.limits

    @paused()
    def price(self, strategy: Strategy) -> Priced:
        """Time and memory that `sw.price` finds for a strategy; raises `StrategyError` as it does.

        The plan is compared and may have no breakdown of memory (`with_causes`).
        """
        if strategy not in self._priced:
            compared = self._forms.of(strategy).refinement.compared(self.unsettled(strategy))
            self._priced[strategy] = Priced(strategy, self._deepened(strategy, compared))
        return self._priced[strategy]

    def unsettled(self, strategy: Strategy) -> Plan:
        """The plan of a strategy by the tables; raises `StrategyError` as `price` does."""
        if strategy not in self._plans:
            candidate = self._forms.of(strategy).spaces.expanded(strategy)
            self._plans[strategy] = marked(candidate.plan(0.0, ()), strategy)
        return self._plans[strategy]

    def _deepened(self, like: Strategy, plan: Plan) -> Plan:
        """A compared plan of the form of `like` that gathers as far ahead as makes it faster."""
        limit = None if self.limit is None else Bytes(self.limit)
        return self._forms.of(like).refinement.deepened(plan, limit)

    def fits(self, peak_bytes: int) -> bool:
        """Whether `peak_bytes` are within the memory limit."""
        return self.limit is None or peak_bytes <= self.limit

    @paused()
    def changes(self, base: Priced, *, every: bool = False) -> tuple[PricedChange, ...]:
        """Single changes of a priced strategy, in descending order of saved time.

        Changes that may save time within the memory, or memory where the strategy does not fit, are
        simulated; with `every` also the others that may fit. Those that have no price, do not fit
        the model, or change neither time nor memory are omitted.
        """
        tight = every or not self.fits(base.plan.peak_bytes)
        found = list(self._by_tables(base, tight=tight))
        found.sort(key=lambda one: (-one.gain, one.bytes))
        least = -math.inf if every else _GAIN
        wanted = [
            one
            for one in found
            if self.fits(int(LEAST_SHARE * (base.plan.peak_bytes + one.bytes)))
            and (one.gain > least or (tight and one.bytes < 0))
        ]
        simulated = {
            id(one): self._simulated(base, one)
            for one in wanted[: None if every else _SIMULATED]
            if not one.is_simulated
        }
        changes = [simulated.get(id(one), one) for one in found]
        effective = [one for one in changes if _has_effect(one, base.plan.peak_bytes)]
        return tuple(sorted(effective, key=lambda one: (-one.gain, one.bytes)))

    def _by_tables(self, base: Priced, *, tight: bool) -> Iterator[PricedChange]:
        """Changes with their differences by the tables, or simulated where these have none.

        Those that only save memory are left out unless memory is `tight`.
        """
        seconds, peak = self._cost(base.strategy)
        seen: set[Cost] = set()  # lists changes of equal effect once, e.g. of `zero` and `dp_shard`
        for change in self._changes_of(base.strategy):
            if not tight and _only_saves_memory(change):
                continue
            cost = self._cost_if_priced(change.strategy)
            if cost is None or (cost in seen and change.field not in _SIMULATED_FIELDS):
                continue
            seen.add(cost)
            gain, more = 1 - cost[0] / seconds, cost[1] - peak
            fits = self.fits(base.plan.peak_bytes + more)
            one = PricedChange(change, gain, more, fits, is_simulated=False)
            if change.field in _SIMULATED_FIELDS:
                one = self._simulated(base, one)
            if _has_effect(one, peak):
                yield one

    def _simulated(self, base: Priced, one: PricedChange) -> PricedChange:
        """The change with the simulated time and memory of its step.

        It gathers as many buckets ahead as `base`.
        """
        strategy = one.change.strategy
        plan = replace(self.unsettled(strategy), ahead=base.plan.ahead)
        plan = self._forms.of(strategy).refinement.compared(plan)
        return PricedChange(
            one.change,
            1 - plan.step_seconds / base.plan.step_seconds,
            plan.peak_bytes - base.plan.peak_bytes,
            self.fits(plan.peak_bytes),
            is_simulated=True,
        )

    def _changes_of(self, strategy: Strategy) -> Iterator[StrategyChange]:
        host, chunks = self.machine.levels[0].size, self._forms.useful_chunks
        products = _products_of(strategy)  # which the compiler decides, too
        made = single_changes(strategy, self.limits, host, chunks)
        return (one for one in made if _products_of(one.strategy) == products)

    def uniform(self, like: Strategy, progress: Progress | None = None) -> Priced | None:
        """The fastest enumerated uniform strategy that fits in memory; None if none does.

        All enumerated strategies have the compilation and the number of chunks of the loss of
        `like`, and the state of the optimizer on the host only where none fits else, parameters
        last. The plan is compared and may have no breakdown of memory.
        """
        for offload in ((), ("optimizer",), ("optimizer", "parameters")):
            one = like.but(offload=offload)
            if priced_as(one, self.graph, self.machine)[1]:
                continue
            with suppress(InfeasibleError, OptimizerError):
                return self._uniform(one, progress)
        return None

    def _uniform(self, like: Strategy, progress: Progress | None) -> Priced:
        """The fastest enumerated uniform strategy with the optimizer's state where `like` has it.

        Raises `InfeasibleError` where none fits, and `OptimizerError` where it has no such state.
        """
        form = self._forms.of(like)
        frontier = strategies_of(
            form.expansion,
            form.tracer,
            refinement=form.refinement,
            progress=progress,
            compiled=like.compile,
            limits=(math.inf if self.limit is None else self.limit,),
            shared=form.spaces,
        )
        best = frontier.fastest_compared(UNLIMITED if self.limit is None else self.limit)
        found = Priced(Strategy.parse(best.name), best)
        hiding = found.strategy
        for name in _HIDING:
            hiding = hiding.switched_on(name) if getattr(like, name) else hiding
        if hiding == found.strategy:
            return found
        compared = form.refinement.compared(self.unsettled(hiding))
        other = Priced(hiding, self._deepened(like, compared))
        return min(found, other, key=lambda one: one.plan.step_seconds)

    def with_causes(self, one: Priced) -> Priced:
        """`one` with a breakdown of its memory, which plans that were only compared lack."""
        refinement = self._forms.of(one.strategy).refinement
        return replace(one, plan=refinement.with_causes(one.plan))

    @paused()
    def beyond(self, like: Strategy) -> Plan | None:
        """The fastest plan that fits with the mesh, micro-batches and compilation of a strategy.

        It is that of the strategy if none is faster. None if none fits, or these plans are not
        searched (`plans_like`). The plan is compared.
        """
        frontier = plans_like(self._forms.of(like), like)
        if frontier is None:
            return None
        found: list[Plan] = []
        with suppress(InfeasibleError):
            limit = UNLIMITED if self.limit is None else self.limit
            found.append(frontier.fastest_compared(limit))
        with suppress(StrategyError):
            found.append(self.price(like).plan)
        fitting = (one for one in found if self.fits(one.peak_bytes))
        return min(fitting, key=lambda one: one.step_seconds, default=None)

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
        found = [one for start in starts if (one := allowed(start)) is not None]
        if not found:
            near = (c.strategy for s in starts for c in self._changes_of(s))
            found = [one for change in near if (one := allowed(change)) is not None]
        for _ in range(_ROUNDS):
            known = len(found)
            best = self._fastest(found)
            if best is None:
                break
            for change in self._changes_of(best):
                one = allowed(change.strategy)
                if one is not None and one not in found:
                    found.append(one)
            if self._fastest(found) == best or len(found) == known:
                break
        return self._fastest_settled(found)

    def _fastest_settled(self, found: list[Strategy]) -> Priced | None:
        """The fastest by simulation that fits: of the priced ones and the fastest by the tables.

        The tables add up memory that is not needed at the same time, so that a faster strategy may
        fit that does not by them.
        """
        known = (self._priced[one] for one in found if one in self._priced)
        fitting = [one for one in known if self.fits(one.plan.peak_bytes)]
        for share in (1.0, LEAST_SHARE):
            for _ in range(_SETTLED):
                best = self._fastest(found, share)
                if best is None or (share < 1 and not self._may_gain(best, fitting)):
                    break
                found.remove(best)
                priced = self.price(best)
                if self.fits(priced.plan.peak_bytes):
                    fitting.append(priced)
        return min(fitting, key=lambda one: one.plan.step_seconds, default=None)

    def _may_gain(self, strategy: Strategy, fitting: Sequence[Priced]) -> bool:
        """Whether a strategy is faster by the tables than all that fit."""
        seconds = min((one.plan.step_seconds for one in fitting), default=math.inf)
        return self._cost(strategy)[0] < (1 - _GAIN) * seconds

    def _fastest(self, found: Sequence[Strategy], share: float = 1.0) -> Strategy | None:
        """The fastest by the tables of those of which a `share` of the memory fits, else of all."""
        costs = {one: cost for one in found if (cost := self._cost_if_priced(one)) is not None}
        fitting = [one for one, cost in costs.items() if self.fits(int(share * cost[1]))]
        fitting = fitting or list(costs)
        return min(fitting, key=lambda one: costs[one], default=None)

    def _cost_if_priced(self, strategy: Strategy) -> Cost | None:
        if priced_as(strategy, self.graph, self.machine)[1]:
            return None
        try:
            return self._cost(strategy)
        except StrategyError:
            return None

    def _cost(self, strategy: Strategy) -> Cost:
        """Seconds and bytes by the tables."""
        if strategy not in self._costs:
            candidate = self._forms.of(strategy).spaces.expanded(strategy)
            cost = candidate.cost
            if self.machine.settles:  # then the times of the tables do not just add up
                cost = candidate.plan(0.0, ()).step_seconds, candidate.peak
            self._costs[strategy] = cost
        return self._costs[strategy]


def _products_of(strategy: Strategy) -> str:
    """The library and the recipe of products in 8 bits; empty for those in other dtypes."""
    recipe = recipe_for(strategy)
    return recipe.products_key if recipe is not None else ""


def _has_effect(one: PricedChange, peak: int) -> bool:
    return abs(one.gain) > _SAME or abs(one.bytes) > _SAME * peak


def _only_saves_memory(change: StrategyChange) -> bool:
    """Whether a change to copies to the host or to a loss in chunks, which save no time."""
    chunked = chunks_of(change.strategy.loss) is not None
    return (change.field == "loss" and chunked) or (
        change.field == "offload" and bool(change.strategy.offload)
    )
