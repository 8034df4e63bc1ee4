"""Lower bounds on the seconds and bytes of strategies, from model replicas and single messages.

The bounds select the strategies to price and do not affect prices. A step takes the passes of a
replica (`replicas.py`), plus the pipeline bubble, plus the messages of weights and gradients. A
rank holds its shard of the state and the saved activations of a replica. The first stages of a
pipeline, which hold activations of the most micro-batches, are taken to have nearly an even share
of the layers: stages are cut evenly in time, and this one figure is chosen, not derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.gradient_sync import LAST
from shardwright.ir.graph import LeafKind
from shardwright.ir.options.mixed_precision import read_bytes, reduced_bytes
from shardwright.ir.redistribution import Collective
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.topology import Link, links
from shardwright.planner.strategies.expansion import Expansion, sync_of
from shardwright.planner.strategies.replicas import Replicas
from shardwright.planner.strategies.roles import SHARDING, mesh_of, role_axes
from shardwright.planner.tables.memory import bucket_sizes
from shardwright.simulate.costs.collectives import charged_part, step_price
from shardwright.simulate.time.pipelines import least_of_slowest, least_step_seconds

Floats = NDArray[np.float64]

_EVEN = 0.8  # the first two stages of a pipeline have at least this fraction of an even share


@final
class Bounds:
    """Computes bounds of strategies of one graph on one machine."""

    def __init__(self, expansion: Expansion) -> None:
        self.expansion = expansion
        self.replicas = Replicas(expansion)
        graph = expansion.graph
        layer = {
            name: number
            for number, span in enumerate(expansion.layers)
            for i in span
            for name in graph.ops[i].operands
        }
        weights, others, gradients = [0], [0], [0]
        saved = [0] * len(expansion.layers)
        for leaf in graph.leaves_of(LeafKind.PARAMETER):
            tensor = graph.tensor[leaf.name]
            if tensor.requires_grad:
                gradients.append(reduced_bytes(graph, leaf.name))
                if len(tensor.shape) > 1:
                    used = read_bytes(graph, leaf.name)
                    (weights if leaf.name in layer else others).append(used)
            if leaf.name in layer and any(
                leaf.name in op.saves for op in graph.consumers[leaf.name]
            ):
                saved[layer[leaf.name]] += read_bytes(graph, leaf.name)
        # Bytes of matrices of layers as they are used, of others, and of all gradients as sent.
        self._weights, self._others = np.array(weights), np.array(others)
        self._gradients = np.array(gradients)
        self._saved = saved  # bytes of the parameters that operators of each layer save
        self._buckets = bucket_sizes(graph)
        self._sent: dict[tuple[object, ...], tuple[float, float]] = {}
        self._rough: dict[Strategy, float] = {}

    def seconds(self, strategy: Strategy) -> float:
        """A lower bound of the step time of this strategy."""
        return self._step(strategy, self._passes(strategy), slowest=True)

    def quick_seconds(self, strategy: Strategy) -> float:
        """A lower bound of `seconds`, without the slowest stage of pipelines."""
        return self._step(strategy, self._passes(strategy), slowest=False)

    def rough_seconds(self, strategy: Strategy) -> float:
        """A lower bound of `quick_seconds`, for which no space is built."""
        if strategy not in self._rough:
            alone = self.replicas.operators_alone(strategy) / self._parts(strategy)
            self._rough[strategy] = self._step(strategy, alone, slowest=False)
        return self._rough[strategy]

    def _passes(self, strategy: Strategy) -> float:
        """Seconds of all passes of the ranks of one replica; 0 if there is no such replica."""
        costs = self.replicas.costs(strategy)
        return 0.0 if costs is None else costs.seconds / self._parts(strategy)

    def _parts(self, strategy: Strategy) -> int:
        """The number of replicas, which share the batch."""
        return self.replicas.of(strategy).micro_batches // strategy.micro_batches

    def _step(self, strategy: Strategy, passes: float, *, slowest: bool) -> float:
        # Whether each group has one stage, whose backward passes are not split.
        waits = schedule_named(strategy.schedule).waits is not None
        longest = 0.0
        if passes and strategy.pp > 1 and slowest and waits:
            longest = self.replicas.slowest_stage(strategy) / self._parts(strategy)
        gathers, sums = self._messages(strategy)
        work = passes + gathers + sums
        if strategy.pp == 1:
            return work
        given = strategy.schedule, work, sums, strategy.pp, strategy.micro_batches
        least = least_step_seconds(*given)
        if not waits:
            return least
        within = least_of_slowest(strategy.pp, strategy.micro_batches, passes, longest)
        return max(least, within)

    def bytes(self, strategy: Strategy) -> int:
        """A lower bound of the peak memory of this strategy on the rank that needs most."""
        costs, stages = self.replicas.costs(strategy), strategy.pp
        shards = strategy.dp_shard * strategy.cp if strategy.zero >= 1 else 1
        if costs is None:
            return 0
        copies = 0.0
        if shards > 1 and not strategy.reshards:
            copies = sum(self._saved) / (strategy.tp * strategy.ep) * (1 - 1 / shards)
        state, saved = costs.state / shards + copies, costs.saved
        if stages == 1:
            return int(state + saved) + costs.other
        # Buffers of all micro-batches on one side of each cut.
        sent = 2 * strategy.micro_batches * self.replicas.crossing(strategy)
        waiting = min(stages, strategy.micro_batches)  # micro-batches, in the first stage
        mean = (state + saved + 2 * (stages - 1) * sent) / stages
        first = _EVEN * (state + waiting * saved) / stages + sent
        second = _EVEN * (state + max(1, waiting - 1) * saved) / stages + 2 * sent
        return int(max(mean, first, second if stages > 2 else 0.0)) + costs.other

    @property
    def _layers(self) -> tuple[range, ...]:
        return self.expansion.layers

    def _messages(self, strategy: Strategy) -> tuple[float, float]:
        """Seconds by which one group's gathers of weights and sums of gradients delay a step.

        Strategies share them that differ in recomputed layers or the schedule.
        """
        axes = strategy.axes, strategy.ep, strategy.expert_tensor
        stored = strategy.zero, strategy.reshards, strategy.micro_batches, sync_of(strategy)
        key = *axes, *stored
        if key not in self._sent:
            self._sent[key] = self._messages_of(strategy)
        return self._sent[key]

    def _messages_of(self, strategy: Strategy) -> tuple[float, float]:
        axes = role_axes(strategy)
        mesh = mesh_of(strategy, axes)
        along = dict(zip(axes, links(self.expansion.machine, mesh), strict=False))
        sharding = [
            (axis.size, link)
            for axis, link in along.items()
            if axis.role in SHARDING and strategy.zero >= 1
        ]
        # Layouts decide which axis moves whole tensors, and which ones parts of them.
        found = [self._sharded(strategy, order) for order in (sharding, sharding[::-1])]
        gathers, sums = (min(seconds) for seconds in zip(*found, strict=True))
        gradients = self._gradients / (strategy.tp * strategy.ep * prod(n for n, _ in sharding))
        for axis, link in along.items():
            if axis.role == "dp_replicate" and not axis.experts:
                sums += self._seconds(Collective.ALL_REDUCE, link, gradients)
        return gathers, sums

    def _sharded(
        self, strategy: Strategy, along: Sequence[tuple[int, Link]]
    ) -> tuple[float, float]:
        """Seconds of gathers and reduce-scatters, where the first of `along` moves whole tensors.

        Of matrices outside of layers, an embedding is not read in the backward pass.
        """
        model, count = strategy.tp * strategy.ep, strategy.micro_batches
        again = 2 if strategy.reshards else 1
        rounds = count if strategy.reshards else 1
        times = 1 if sync_of(strategy) == LAST else count
        gathers = sums = 0.0
        for size, link in along:
            weights, others = self._weights / model, self._others / model
            gathers += rounds * again * self._seconds(Collective.ALL_GATHER, link, weights)
            gathers += rounds * self._seconds(Collective.ALL_GATHER, link, others)
            gradients = self._gradients / model
            sums += times * self._seconds(Collective.REDUCE_SCATTER, link, gradients)
            model *= size
        return gathers, sums

    def _seconds(self, kind: Collective, link: Link, sizes: Floats) -> float:
        """Seconds of bucketed messages of these bytes (of the whole tensors).

        Each message pays for a launch in proportion to the part of a bucket that it fills.
        """
        price = step_price(kind, link, self.expansion.machine)
        bucket = self._buckets.gathers if kind is Collective.ALL_GATHER else self._buckets.sums
        launches = np.minimum(1.0, sizes / bucket).sum()
        whole, tile = sizes.sum(), sizes.sum() / link.ranks
        if kind is Collective.ALL_REDUCE:
            before, after = whole, whole
        else:
            before, after = (tile, whole) if kind is Collective.ALL_GATHER else (whole, tile)
        moved = price.seconds(int(before), int(after)) - price.fixed
        charged = charged_part(kind, self.expansion.machine)
        return float(charged * (price.fixed * launches + moved))
