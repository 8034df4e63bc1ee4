"""Costs of one model replica, which strategies share whose replicas are equal.

A replica is the ranks that share one part of the batch: those along `cp` and `tp`, and as many of
`dp_shard` as experts are split over. Data parallelism splits the batch as micro-batches do, so a
replica that takes `dp_replicate x dp_shard` times as many micro-batches has the same tiles, the
same messages inside of it and the same kept activations as the ranks of the whole strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from shardwright.ir.strategy.recompute import NONE
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.pipeline.partition import Intervals, slowest_at_least
from shardwright.planner.space_factory import DecidedOptions
from shardwright.planner.strategies.expansion import Expansion, SpaceOfStrategy
from shardwright.planner.strategies.recomputation import BY_LAYER
from shardwright.planner.strategies.roles import role_axes
from shardwright.planner.strategies.tilings import StorageKind
from shardwright.planner.tables.memory import fixed_bytes

_ROUNDED = 1 - 1e-9  # sums of the same terms in another order differ by less


@dataclass(frozen=True, slots=True)
class ReplicaCosts:
    """Costs of a replica that computes the whole batch, with all layers on each of its ranks.

    Attributes:
        seconds: of the forward and backward passes of all micro-batches, with the messages inside
            of the replica; without gradients and updates of parameters.
        state: bytes of weights, gradients and optimizer state of a rank.
        saved: bytes of one micro-batch that a rank keeps for the backward pass, without values that
            depend on the batch alone: the whole batch may have them at once, which is that of all
            replicas here.
        other: bytes of the batch, and of the largest operator or recomputed segment.
    """

    seconds: float
    state: int
    saved: int
    other: int


@final
class Replicas:
    """Prices the replicas of strategies of one graph on one machine."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self._known: dict[Strategy, Strategy] = {}
        self._spaces: dict[Strategy, SpaceOfStrategy] = {}
        self._costs: dict[Strategy, ReplicaCosts] = {}
        self._operators: dict[Strategy, float] = {}
        self._crossing: dict[tuple[Strategy, int], int] = {}
        self._slowest: dict[tuple[Strategy, int], float] = {}

    def of(self, strategy: Strategy) -> Strategy:
        """The strategy of one replica, as `replica_of`."""
        if strategy not in self._known:
            self._known[strategy] = replica_of(strategy)
        return self._known[strategy]

    def costs(self, strategy: Strategy) -> ReplicaCosts | None:
        """The costs of a replica of `strategy`; None if the graph has no such micro-batches."""
        alone = self.of(strategy)
        if alone not in self._costs:
            counts, _ = self.expansion.sources.possible((alone.micro_batches,))
            if alone.micro_batches not in counts:
                return None
            space = self._space(alone)
            running = space.offer.running_of(space.assignment_of(alone)[None])
            transient = int(space.writer.transients.at(running.points)[0])
            self._costs[alone] = ReplicaCosts(
                float(running.passes[0, -1]),
                int(running.state[0, -1]),
                max(0, int(running.kept[0, -1]) - self._whole),
                transient + fixed_bytes(self.expansion.graph),
            )
        return self._costs[alone]

    def operators_alone(self, strategy: Strategy) -> float:
        """A lower bound of the seconds of `costs`, for which no space is built.

        These are the seconds of all operators, each with the messages inside of it and run once.
        Redistributions between operators and recomputation only add to them.
        """
        alone = self.of(strategy)
        if alone not in self._operators:
            once = replace(alone, recompute=NONE)
            if once not in self._operators:
                self._operators[once] = self._seconds_of_operators(once) * _ROUNDED
            self._operators[alone] = self._operators[once]
        return self._operators[alone]

    def _seconds_of_operators(self, alone: Strategy) -> float:
        sources = self.expansion.sources
        counts, _ = sources.possible((alone.micro_batches,))
        if alone.micro_batches not in counts:
            return 0.0
        machine, mesh, tilings = self.expansion.setting(alone)
        given = self.expansion.optimizer, alone.micro_batches, ()
        options = DecidedOptions(*given, compiled=alone.compile != "off")
        free = sources.costs(machine, mesh, options)
        model = free.with_allowed(tilings.of_operators(free))
        ops = zip(sources.short.counts, model.graph.ops, strict=True)
        return sum(count * float(model.operator(op).seconds[0]) for count, op in ops)

    @cached_property
    def _whole(self) -> int:
        """Bytes of the saved values that depend on the batch alone."""
        tensors = self.expansion.graph.tensor
        saved = {name for op in self.expansion.graph.ops for name in op.saves}
        return sum(tensors[name].bytes for name in saved if not tensors[name].requires_grad)

    def crossing(self, strategy: Strategy) -> int:
        """Bytes of a rank's tiles of one micro-batch at the cut that the fewest cross."""
        alone = replace(self.of(strategy), recompute=NONE)
        key = alone, strategy.stages
        if key not in self._crossing:
            space = self._space(alone)
            choices, cuts = space.assignment_of(alone)[None], self.expansion.sources.cuts
            found = (
                sum(int(space.writer.tile_bytes(name, choices)[0]) for name in cuts.crossing(place))
                for place in cuts.positions(strategy.stages)[1:-1].tolist()
            )
            self._crossing[key] = min(found, default=0)
        return self._crossing[key]

    def slowest_stage(self, strategy: Strategy) -> float:
        """The least seconds that the slowest stage of any cut computes the whole batch for."""
        alone, stages = self.of(strategy), strategy.stages
        key = alone, stages
        if key not in self._slowest:
            space = self._space(alone)
            running = space.offer.running_of(space.assignment_of(alone)[None])
            cuts = self.expansion.sources.cuts
            positions = cuts.positions(stages)
            intervals = Intervals.of(cuts.trains(positions))
            done = running.passes[0, positions]
            times = done[intervals.end] - done[intervals.begin]
            costs = np.broadcast_to(times, (stages, len(times)))
            self._slowest[key] = slowest_at_least(costs, intervals)
        return self._slowest[key]

    def _space(self, alone: Strategy) -> SpaceOfStrategy:
        """The space of a replica, which strategies that recompute other layers share."""
        shared = replace(alone, recompute=NONE) if alone.recompute.kind in BY_LAYER else alone
        if shared not in self._spaces:
            kinds = (StorageKind.of(shared),)
            self._spaces[shared] = SpaceOfStrategy(self.expansion, shared, kinds)
        return self._spaces[shared]


def replica_of(strategy: Strategy) -> Strategy:
    """The strategy of one replica, in as many micro-batches as all replicas together.

    >>> str(replica_of(Strategy.parse("dp_replicate=2 dp_shard=4 tp=2 pp=2 mb=4")))
    'tp=2 mb=32 zero=0'
    """
    inner = 1  # ranks along `dp_shard` over which experts, or their features, are split
    for axis in role_axes(strategy):
        inner *= axis.size if axis.role == "dp_shard" and (axis.experts or axis.features) else 1
    data = strategy.dp_replicate * strategy.dp_shard // inner
    return strategy.but(
        dp_replicate=1,
        dp_shard=inner,
        pp=1,
        zero=0,
        schedule=Strategy().schedule,
        virtual_stages=1,
        stage_cut=None,
        reshard_after_forward=None,
        gradient_sync=None,
        micro_batches=strategy.micro_batches * data,
    )
