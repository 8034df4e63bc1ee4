"""Lower bounds on the seconds and bytes of strategies, from one device's step and single messages.

The bounds select the strategies to price and do not affect prices. A step takes at least its share
of the step of a single device, plus the pipeline bubble, plus the largest messages of its axes. A
rank holds at least its share of state and saved activations.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.gradient_sync import LAST
from shardwright.ir.graph import LeafKind
from shardwright.ir.options.mixed_precision import stored_bytes
from shardwright.ir.redistribution import Collective
from shardwright.ir.strategy.fields import COMPILES
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.topology import Link, links
from shardwright.planner.pipeline.stage_costs import most_updates
from shardwright.planner.strategies.expansion import Expansion, SpaceOfStrategy, sync_of
from shardwright.planner.strategies.layers import recomputed_layers
from shardwright.planner.strategies.roles import SHARDING, mesh_of, role_axes
from shardwright.planner.strategies.tilings import StorageKind
from shardwright.planner.tables.memory import bucket_sizes, fixed_bytes
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.time.pipelines import least_step_seconds
from shardwright.solve.elimination.problem import Ints

Floats = NDArray[np.float64]

_EVEN = 0.8  # the first stage of a pipeline has at least this fraction of an even share
_LEAST = 0.98  # factor on bounds, because tiles of other shapes may be computed slightly faster


@final
class Bounds:
    """Computes bounds of strategies of one graph on one machine; `compiled` applies to all."""

    def __init__(self, expansion: Expansion, compiled: str = COMPILES[0]) -> None:
        self.expansion = expansion
        self._alone = Strategy(compile=compiled)
        graph = expansion.graph
        inside = {
            name for layer in expansion.layers for i in layer for name in graph.ops[i].operands
        }
        weights, others, gradients = [0], [0], [0]
        for leaf in graph.leaves_of(LeafKind.PARAMETER):
            tensor = graph.tensor[leaf.name]
            if tensor.requires_grad:
                gradients.append(stored_bytes(graph, leaf.name))
                if len(tensor.shape) > 1:
                    (weights if leaf.name in inside else others).append(tensor.bytes)
        # Bytes of matrices of layers as they are used, of other matrices, and of all gradients.
        self._weights, self._others = np.array(weights), np.array(others)
        self._gradients = np.array(gradients)
        self._buckets = bucket_sizes(graph)

    def seconds(self, strategy: Strategy) -> float:
        """A lower bound of the step time of this strategy."""
        groups = self.expansion.machine.devices // strategy.pp
        kept, again = self._times
        part = self._recomputed_part(strategy)
        work = _LEAST * ((1 - part) * kept + part * again) / groups
        if not self.expansion.machine.settles:  # elsewhere messages are hidden behind compute
            work += self._messages(strategy)
        if strategy.pp == 1:
            return work
        once = self._updates / groups
        return least_step_seconds(
            strategy.schedule, work, once, strategy.pp, strategy.micro_batches
        )

    def bytes(self, strategy: Strategy) -> int:
        """A lower bound of the peak memory of this strategy on the rank that needs most."""
        state, kept, again = self._memory_parts
        model = strategy.tp * strategy.pp * strategy.ep
        shards = strategy.dp_shard * strategy.cp if strategy.zero >= 1 else 1
        shards = min(shards * model, self.expansion.machine.devices)
        part = self._recomputed_part(strategy)
        waiting = min(strategy.pp, strategy.micro_batches)  # micro-batches, in the first stage
        saved = ((1 - part) * kept + part * again) / strategy.micro_batches
        saved *= 1 + _EVEN * (waiting - 1)
        copies = 0.0
        if shards > model and not strategy.reshards:
            gathered = self._weights.sum() / model * (1 - 1 / (strategy.dp_shard * strategy.cp))
            copies = (1 - part) * gathered * (1 + _EVEN * (waiting - 1))
        sent = 2 * self._crossing * strategy.pp * (strategy.pp > 1)  # buffers of all micro-batches
        shared = (saved + sent) / self.expansion.machine.devices
        return int(state / shards + shared + _EVEN * copies)

    @cached_property
    def _one(self) -> tuple[SpaceOfStrategy, Ints, Ints]:
        """The step of one device."""
        kind = StorageKind.of(self._alone)
        space = SpaceOfStrategy(self.expansion, self._alone, (kind,))
        return space, *space.assignments(kind)

    @cached_property
    def _times(self) -> tuple[float, float]:
        """Seconds of one device's step, without recomputation and with all of it."""
        space, *choices = self._one
        kept, again = space.writer.space.prices.priced(np.stack(choices))[0].tolist()
        return kept, again

    @cached_property
    def _updates(self) -> float:
        return most_updates(self._one[0].writer)

    @cached_property
    def _memory_parts(self) -> tuple[int, int, int]:
        """Bytes of state, and of what is saved without recomputation and with all of it."""
        space, *choices = self._one
        _, memory = space.writer.space.prices.priced(np.stack(choices))
        lasting = space.writer.lasting_bytes(tuple(choices[0].tolist()))
        state = lasting - fixed_bytes(self.expansion.graph)
        return state, int(memory[0]) - state, int(memory[1]) - state

    @cached_property
    def _crossing(self) -> int:
        """Bytes of the values, for the whole batch, that cross the smallest cut between layers."""
        graph, cuts = self.expansion.graph, self.expansion.sources.cuts
        starts = [layer.start for layer in self.expansion.layers[1:]]
        found = (sum(graph.tensor[n].bytes for n in cuts.crossing(place)) for place in starts)
        return min(found, default=0)

    def _recomputed_part(self, strategy: Strategy) -> float:
        """The fraction of layers that is recomputed; 0 if only parts of layers are."""
        layers = self.expansion.layers
        if not layers or strategy.recompute.kind not in ("full", "every"):
            return 0.0
        return len(recomputed_layers(strategy.recompute, layers)) / len(layers)

    def _messages(self, strategy: Strategy) -> float:
        """Seconds of the messages of one group: of weights, gradients and inner features."""
        axes = role_axes(strategy)
        along = dict(zip(axes, links(self.expansion.machine, mesh_of(axes)), strict=False))
        model, count = strategy.tp * strategy.ep, strategy.micro_batches
        weights, gradients = self._weights / model, self._gradients / model
        others = self._others / model
        found = 0.0
        for axis, link in along.items():
            if axis.role in SHARDING and strategy.zero >= 1:
                # Of matrices outside of layers, an embedding is not read in the backward pass.
                once = strategy.pp == 1 and not strategy.reshards
                rounds = 1 if once else count
                again = 2 if strategy.reshards else 1
                found += rounds * again * self._seconds(Collective.ALL_GATHER, link, weights)
                found += rounds * self._seconds(Collective.ALL_GATHER, link, others)
                times = 1 if sync_of(strategy) == LAST else count
                found += times * self._seconds(Collective.REDUCE_SCATTER, link, gradients)
                weights, others = weights / axis.size, others / axis.size
                gradients /= axis.size
        for axis, link in along.items():
            if axis.role == "dp_replicate" and not axis.experts:
                found += self._seconds(Collective.ALL_REDUCE, link, gradients)
            elif axis.role == "tp" and strategy.ep == 1:
                data = strategy.dp_replicate * strategy.dp_shard * strategy.cp
                sums = np.array([self._row_parallel(strategy.tp) / data])
                # Forward and backward, each a gather and a reduce-scatter, or one all-reduce.
                found += 4 * self._seconds(Collective.REDUCE_SCATTER, link, sums)
        return found

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
        return float(price.fixed * launches + moved)

    def _row_parallel(self, degree: int) -> int:
        """Bytes of the results of contractions over inner features, which `tp` reduces."""
        if degree not in self._sums:
            graph, rules = self.expansion.graph, self.expansion.sources.analysis.rules
            inner, total = self.expansion.dimensions.splits(degree), 0
            for op in graph.ops:
                rule = rules[op.name]
                if rule.work and not rule.joint_splits and len(op.operands) >= 2:
                    weight = {rule.factor[f].atom for names in rule.operands[1] for f in names}
                    result = {rule.factor[f].atom for names in rule.results[0] for f in names}
                    if (weight - result) & inner and not result & inner:
                        total += graph.tensor[op.outputs[0]].bytes
            self._sums[degree] = total
        return self._sums[degree]

    @cached_property
    def _sums(self) -> dict[int, int]:
        return {}
