"""The Pareto frontier of uniform strategies: enumerated, pruned by bounds, and priced."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, final

from shardwright.ir.frontier import Plans
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes
from shardwright.ir.op_memory import OpTracer
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.ir.plan import Plan
from shardwright.ir.strategy.fields import COMPILES
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.ir.strategy.strategy import Strategy, divisors
from shardwright.machine.model import Machine
from shardwright.planner.arguments import require_graph
from shardwright.planner.gc_pause import paused
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.off_frontier import OffFrontierPlans
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.settle import settled
from shardwright.planner.strategies.expansion import Expansion, SpaceOfStrategy, sync_of
from shardwright.planner.strategies.form import form_of, in_8_bit
from shardwright.planner.strategies.frontier.bounds import Bounds
from shardwright.planner.strategies.frontier.enumeration import Limited, rescheduled, strategies_on
from shardwright.planner.strategies.recomputation import BY_LAYER
from shardwright.planner.strategies.tilings import StorageKind
from shardwright.planner.strategies.unpriced import require_recipe
from shardwright.program.lower.stages import needs_one_stage
from shardwright.solve.frontier.frontier_sampling import spaced

Progress = Callable[[str, float], None]

RESOLUTION = 1e-2  # strategies whose bound permits a smaller relative gain in time are not priced
_PLANS = 48
_LEVELS = 3  # the number of memory limits, each half of the one before
# In place of the bound of bytes where only the rough bound is known, or the quick one, too.
_ROUGH, _QUICK = -2, -1
_TRIES = 24  # the most strategies priced for each limit below the memory of a device


@dataclass(frozen=True, slots=True)
class Until:
    """The end of pricing, which goes by the order of lower bounds.

    Attributes:
        end: a time, by the performance counter.
        known: seconds of another plan that fits all limits, which strategies have to beat.
        patience: the number of strategies in a row that are no better; None: no such end.
    """

    end: float = math.inf
    known: float = math.inf
    patience: int | None = None


ALL = Until()


@paused()
def strategies(
    graph: Graph,
    machine: Machine,
    optimizer: str,
    tracer: OpTracer,
    *,
    tp_across_hosts: bool = False,
    progress: Progress | None = None,
    fp8: str | None = None,
) -> SearchedFrontier:
    """The Pareto frontier of step time and memory over the plans of uniform strategies.

    A strategy is priced only if its lower bounds permit a gain of more than one per cent in time
    over every priced strategy that needs no more memory. `fp8` is the value of that field in all
    strategies, with the compilation that it needs. Raises `StrategyError` if there is no strategy
    for these devices, or that recipe has no price.
    """
    require_graph(graph)
    like = in_8_bit(fp8)
    require_recipe(like, machine)
    return strategies_of(
        Expansion(form_of(graph, like), machine, optimizer),
        tracer,
        tp_across_hosts=tp_across_hosts,
        progress=progress,
        compiled=like.compile,
    )


def strategies_of(
    expansion: Expansion,
    tracer: OpTracer,
    *,
    tp_across_hosts: bool = False,
    progress: Progress | None = None,
    compiled: str = COMPILES[0],
    limits: Sequence[float] | None = None,
    shared: SharedSpaces | None = None,
    refinement: Refinement | None = None,
) -> SearchedFrontier:
    """The frontier of `strategies`, of the graph and machine of an expansion.

    `limits` and `shared` are those of `priced`; `refinement` settles plans of this graph.
    """
    start, machine = time.perf_counter(), expansion.machine
    within = limited(expansion, tp_across_hosts=tp_across_hosts)
    numerics = expansion.graph.numerics
    offload = optimizer_spec(expansion.optimizer).offload
    same: dict[str, Any] = {"compile": compiled, "offload": offload}
    every = [one.but(**same).in_form(numerics) for one in strategies_on(machine, within)]
    if not every:
        raise StrategyError(
            f"no uniform strategy divides the batch of {expansion.limits.batch} over the"
            f" {machine.devices} devices; change the batch"
        )
    found = priced(expansion, every, progress, limits=limits, shared=shared)
    if refinement is None:
        analysis = expansion.sources.analysis
        refinement = Refinement(expansion.graph, machine, expansion.optimizer, tracer, analysis)
    return frontier_of(expansion, found, refinement, start, _plan)


def limited(expansion: Expansion, *, tp_across_hosts: bool) -> Limited:
    """The limits of an enumeration for one graph and machine."""
    machine, model = expansion.machine, expansion.limits
    degrees = [n for n in divisors(machine.devices) if n == 1 or _splits_evenly(expansion, n)]
    widest = machine.devices if tp_across_hosts else machine.levels[0].size
    cuts = not needs_one_stage(expansion.graph) and expansion.sources.cuts.allow(2)
    counts, _ = expansion.sources.possible(None)
    return Limited(model, tuple(degrees), widest, cuts, counts)


def _splits_evenly(expansion: Expansion, degree: int) -> bool:
    heads = (expansion.limits.heads, expansion.limits.key_value_heads)
    fits = all(count is None or count % degree == 0 for count in heads)
    return fits and bool(expansion.dimensions.splits(degree))


def priced(
    expansion: Expansion,
    every: Sequence[Strategy],
    progress: Progress | None = None,
    *,
    limits: Sequence[float] | None = None,
    until: Until = ALL,
    reschedule: bool = True,
    shared: SharedSpaces | None = None,
) -> list[Candidate]:
    """Price the strategies that bounds do not exclude, and the best ones under other schedules.

    Without `reschedule` pipelines stay under the schedules that they have.

    The best strategy is searched within each of `limits`, in bytes; None means the memory of a
    device, half of it, and so on. `until` says when pricing stops. `shared` keeps bounds and spaces
    of the expansion for further calls.
    """
    if limits is None:
        memory = expansion.machine.device.usable_bytes
        limits = tuple(memory / 2**i for i in range(_LEVELS))
    pricing = _Pricing(shared or SharedSpaces(expansion), every, limits, until)
    pricing.search(progress)
    if reschedule:
        pricing.reschedule()
    return pricing.candidates


@final
class SharedSpaces:
    """Bounds and spaces of strategies of one graph on one machine, each computed once."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.bounds = Bounds(expansion)
        self._known: dict[tuple[_Key, tuple[StorageKind, ...]], SpaceOfStrategy] = {}

    def of(self, strategy: Strategy, kinds: tuple[StorageKind, ...]) -> SpaceOfStrategy:
        """The space of a strategy and of others that differ in storage and recomputed layers."""
        key = _key(strategy), kinds
        if key not in self._known:
            self._known[key] = SpaceOfStrategy(self.expansion, strategy, kinds)
        return self._known[key]

    def expanded(self, strategy: Strategy) -> Candidate:
        """The point of a strategy; raises `StrategyError` as `Expansion.expanded` does."""
        self.expansion.require(strategy)
        return self.of(strategy, (StorageKind.of(strategy),)).candidate(strategy)


class _Pricing:
    """Prices strategies in order of their bounds, within several memory limits.

    A strategy is excluded if a priced one is at least as fast as its bound within the first limit
    that it may fit. For limits below the largest only `_TRIES` strategies are priced, because no
    strategy may fit them.
    """

    def __init__(
        self,
        spaces: SharedSpaces,
        every: Sequence[Strategy],
        limits: Sequence[float],
        until: Until,
    ) -> None:
        self._until, self._in_vain = until, 0
        self.expansion, self.bounds, self._spaces = spaces.expansion, spaces.bounds, spaces
        self.every = every
        self.candidates: list[Candidate] = []
        self._kinds: dict[_Key, dict[StorageKind, None]] = {}
        for strategy in every:
            self._kinds.setdefault(_key(strategy), {})[StorageKind.of(strategy)] = None
        self._most = max(limits)
        self._best: dict[float, tuple[float, Strategy | None]] = dict.fromkeys(
            (*limits, math.inf), (until.known, None)
        )
        self._tries = Counter[float]()

    @property
    def _is_over(self) -> bool:
        late = time.perf_counter() >= self._until.end
        return late or self._in_vain == self._until.patience

    def search(self, progress: Progress | None) -> None:
        """Price the strategies that bounds do not exclude.

        Closer bounds are computed of those only that cheaper ones do not exclude: the rough bound
        of all, the quick one, and the last one. If none may fit the largest limit, the others are
        priced.
        """
        queue = [
            (self.bounds.rough_seconds(one), _ROUGH, number)
            for number, one in enumerate(self.every)
        ]
        heapify(queue)
        unfit: list[tuple[float, int, Strategy]] = []
        fits = False
        while queue and not _excludes(queue[0][0], max(known for known, _ in self._best.values())):
            if self._is_over:
                return
            seconds, size, number = heappop(queue)
            strategy = self.every[number]
            if size == _ROUGH:
                heappush(queue, (self.bounds.quick_seconds(strategy), _QUICK, number))
            elif size == _QUICK:
                found = self.bounds.seconds(strategy), self.bounds.bytes(strategy)
                heappush(queue, (*found, number))
            elif size > self._most:
                unfit.append((seconds, size, strategy))
            else:
                fits = True
                if progress is not None:
                    progress(f"strategy {strategy}", 1 - len(queue) / len(self.every))
                self._try(seconds, size, strategy)
        left = (self.every[number] for _, _, number in queue)
        if fits or any(self.bounds.bytes(one) <= self._most for one in left):
            return
        for one in unfit:
            if self._is_over:
                return
            self._try(*one)

    def _try(self, seconds: float, size: int, strategy: Strategy) -> None:
        """Price a strategy of which these are the bounds, unless they exclude it."""
        level = min(limit for limit in self._best if limit >= size)
        if _excludes(seconds, self._best[level][0]):
            return
        if level < self._most and self._tries[level] >= _TRIES:
            return
        self._tries[level] += 1
        self._price(strategy)

    def reschedule(self) -> None:
        """Price the best pipeline within each limit under other schedules."""
        best = [strategy for _, strategy in self._best.values() if strategy is not None]
        for strategy in dict.fromkeys(best):
            for one in rescheduled(strategy, len(self.expansion.layers)):
                self._price(one)

    def _price(self, strategy: Strategy) -> None:
        space = self._spaces.of(strategy, tuple(self._kinds[_key(strategy)]))
        try:
            candidate = space.candidate(strategy)
        except StrategyError:  # the model has no such number of stages
            return
        self.candidates.append(candidate)
        seconds = candidate.point.time
        self._in_vain += 1
        for limit, (known, _) in self._best.items():
            if candidate.peak <= limit and seconds < known:
                self._best[limit] = seconds, strategy
                self._in_vain = 0


def _excludes(seconds: float, known: float) -> bool:
    """Whether a plan of `known` seconds excludes strategies of at least `seconds`."""
    return known <= seconds * (1 + RESOLUTION)


_Key = tuple[object, ...]


def _key(strategy: Strategy) -> _Key:
    """Equal for strategies that share a space."""
    degrees = (strategy.dp_replicate, strategy.dp_shard, strategy.cp, strategy.tp, strategy.pp)
    word = str(strategy.recompute)
    by_layer = strategy.recompute.kind in BY_LAYER
    shared = strategy.micro_batches, sync_of(strategy), strategy.compile
    experts = strategy.ep, strategy.expert_tensor
    tilings = strategy.order, strategy.sequence_parallel, strategy.cp_style, strategy.loss
    return (*degrees, *experts, *shared, *tilings, None if by_layer else word)


def frontier_of(
    expansion: Expansion,
    found: Sequence[Candidate],
    refinement: Refinement,
    start: float,
    write: Callable[[Candidate], Plan],
) -> SearchedFrontier:
    """The frontier of priced candidates, whose plans are built by `write` on first use.

    `start` is when the search for them started, by the performance counter.
    """
    machine = expansion.machine
    costs = [candidate.cost for candidate in found]
    kept = spaced(found, costs, _PLANS, 0.0)
    if machine.settles:  # then times do not just add up
        costs, written = settled(kept, lambda one: refinement.ranked(write(one)))
        kept = spaced(kept, costs, _PLANS, 0.0)
        ends = [(written(one).step_seconds, written(one).peak_bytes) for one in kept]
        plans = Plans(ends, lambda place: written(kept[place]))
    else:
        plans = Plans([one.cost for one in kept], lambda place: write(kept[place]))
    return SearchedFrontier(
        plans,
        search_seconds=time.perf_counter() - start,
        simulation=refinement,
        least=lambda place: kept[place].least,
        off_frontier=OffFrontierPlans(
            found,
            write,
            refinement.seconds,
            refinement.compared,
            refinement.deepened,
            adds_up=not machine.settles,
        ).faster,
        device_bytes=Bytes(machine.device.usable_bytes),
    )


def _plan(candidate: Candidate) -> Plan:
    return candidate.plan(0.0, ())
