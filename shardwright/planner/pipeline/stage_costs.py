"""Costs of graph intervals as pipeline stages, at selected points of one space.

A point decides everything on the mesh of one group of devices. Its cost is a sum over nodes and
edges, each of which belongs to one operator, so the cost of a stage is a difference of two prefix
sums over operators. Parameters, their copies and their state count once, activations once for each
micro-batch in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import LeafKind
from shardwright.ir.redistribution import Exchange
from shardwright.machine.topology import Link
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.simulate.costs.collectives import step_price
from shardwright.solve.elimination.pricing import PriceList, sums
from shardwright.solve.elimination.problem import Bools, Floats, Ints, Point

_POINTS = 12  # points of a mesh from which stages choose


@dataclass(frozen=True, eq=False)
class NodeOwners:
    """The operator to which every node of whole assignments belongs.

    Attributes:
        cost: the index of the operator whose stage pays for the node, (nodes,).
        choice: the index of the operator whose stage decides the node, (nodes,); a segment that may
            be recomputed is decided by one stage.
        state: whether the node is a parameter, (nodes,).
    """

    cost: Ints  # (nodes,)
    choice: Ints  # (nodes,)
    state: Bools  # (nodes,)

    @classmethod
    def of(cls, writer: PlanBuilder) -> NodeOwners:
        graph, folded = writer.graph, writer.space.folded
        count, last = folded.num_nodes, len(graph.ops)
        state = np.zeros(count, bool)
        number = {op.name: i for i, op in enumerate(graph.ops)}
        leaves = {}
        for leaf in graph.leaves_of(LeafKind.PARAMETER):
            readers = graph.consumers[leaf.name]
            leaves[leaf.name] = number[readers[0].name] if readers else 0
        state[[node for node, _, _ in writer.least_of_nodes(leaves)]] = True
        owners, switches = [last] * count, [-1] * count
        for node, switch, owner in writer.least_of_nodes({**number, **leaves}):
            owners[node] = min(owners[node], owner)
            switches[node] = switch
        cost, switch_of = np.array(owners, np.int64), np.array(switches, np.int64)
        _, tail, head = folded.edge_ends()
        unknown = cost == last  # readings and switches belong to the operator of a neighbour
        found = cost.copy()
        np.minimum.at(found, tail[unknown[tail]], cost[head[unknown[tail]]])
        np.minimum.at(found, head[unknown[head]], cost[tail[unknown[head]]])
        cost = np.where(found == last, 0, found)
        choice = np.where(switch_of >= 0, cost[switch_of], cost)
        return cls(cost, choice, state)


@final
class Offer:
    """Evenly chosen points of a writer's space, from which stages choose."""

    def __init__(self, writer: PlanBuilder, points: Sequence[Point]) -> None:
        self.writer = writer
        self.prices = writer.space.prices
        self.owners = NodeOwners.of(writer)
        every = np.linspace(0, len(points) - 1, min(_POINTS, len(points))).round().astype(int)
        self.points: Ints = np.array([points[i].choice for i in np.unique(every)], np.int64)

    @cached_property
    def running(self) -> RunningCosts:
        """The running costs of the points."""
        return self.running_of(self.points)

    def running_of(self, assignments: Ints) -> RunningCosts:
        """The running costs of whole assignments, (P, nodes)."""
        return RunningCosts(self.writer, self.prices, self.owners, assignments)


def most_updates(writer: PlanBuilder) -> float:
    """Upper bound of the seconds of the optimizer's update over all plans of a space."""
    space = writer.space
    nodes, twins = space.problem.nodes, space.recompute_choice.twins
    times = np.bincount(space.folded.node_tables(), minlength=len(nodes))
    begin = space.first_parameter
    return sum(
        float(times[n] * max(nodes[n].time.max(), nodes[twins.get(n, n)].time.max()))
        for n in range(begin, begin + len(space.parameters))
    )


@final
class RunningCosts:
    """Costs of whole assignments, (P, nodes), as running sums over operators.

    Column i of a sum has the terms of all operators before operator i: (P, operators + 1).
    """

    def __init__(
        self, writer: PlanBuilder, prices: PriceList, owners: NodeOwners, points: Ints
    ) -> None:
        self.writer, self.owners, self.points = writer, owners, points
        entries = prices.entries_of(points)
        terms = np.arange(entries.shape[1])
        owner = owners.cost[prices.head]
        is_node = terms < len(owners.cost)
        is_state = is_node & owners.state[prices.head]
        is_copy = ~is_node & owners.state[prices.tail]
        time, memory = prices.time[entries], prices.memory[entries]
        self.feasible = np.isfinite(time).all(axis=1)
        time[~np.isfinite(time)] = 0.0
        self.passes = self._running(time, owner, ~is_state)  # seconds of a step
        self.once = self._running(time, owner, is_state)
        self.state = self._running(memory, owner, is_state).astype(np.int64)  # bytes
        self.copies = self._running(memory, owner, is_copy).astype(np.int64)  # of parameters
        self.kept = self._running(memory, owner, ~is_state & ~is_copy).astype(np.int64)
        self.states = memory[:, : len(owners.cost)]  # of the nodes that are parameters

    def _running(self, amounts: Floats | Ints, owner: Ints, mask: Bools) -> Floats:
        """Running sums: (P, terms) -> (P, operators + 1). Bytes are exact."""
        size, rows = len(self.writer.graph.ops) + 1, len(amounts)
        where = (np.arange(rows) * size)[:, None] + (owner[mask] + 1)
        found = sums(where.ravel(), amounts[:, mask].ravel(), rows * size).reshape(rows, size)
        return np.cumsum(found, axis=1)


@final
class StageCosts:
    """Costs of intervals between `positions`, some of `cuts` with both ends of the graph.

    `positions` are the same for all `running` assignments, (C,), or one row for each, (P, C).
    `link` connects the groups.
    """

    def __init__(self, running: RunningCosts, cuts: StageCuts, positions: Ints, link: Link) -> None:
        self.running, self.cuts = running, cuts
        self.writer, self.feasible = running.writer, running.feasible
        self.positions = np.broadcast_to(positions, (len(running.points), positions.shape[-1]))
        self.micro_batches = self.writer.space.model.micro_batches
        self.passes = self._at(running.passes)  # seconds of a step, (P, C)
        self.once = self._at(running.once)
        self.state = self._at(running.state)  # bytes
        self.copies = self._at(running.copies)
        self.kept = self._at(running.kept)
        self.crossing = self._crossing()  # bytes of one micro-batch at each cut, (P, C)
        price = step_price(Exchange.MESSAGE, link, self.writer.space.model.machine)
        inner = (self.crossing > 0) * price.fixed + self.crossing * price.per_before
        self.crossing_seconds = inner * 2  # of values, and of their gradients

    def seconds(self) -> Floats:
        """Seconds of a step in every interval, from one cut to another: (P, C, C)."""
        crossing_seconds, total = (
            self.crossing_seconds * self.micro_batches,
            self.passes + self.once,
        )
        found: Floats = total[:, None, :] - total[:, :, None] + crossing_seconds[:, :, None]
        found[~self.feasible] = np.inf
        return found

    def bytes(self, waiting: int) -> Ints:
        """Bytes of every interval, as a stage with `waiting` micro-batches: (P, C, C)."""
        sizes: Ints = self.state + self.copies + waiting * self.kept
        buffers = 2 * self.micro_batches * self.crossing
        ends: Ints = buffers[:, :, None] + buffers[:, None, :]
        found: Ints = sizes[:, None, :] - sizes[:, :, None] + self._copies + ends
        return found

    @cached_property
    def _copies(self) -> Ints:
        """Bytes of parameters that an interval reads and an earlier one owns: (P, C, C)."""
        positions = self.positions
        found = np.zeros((*positions.shape, positions.shape[1]), np.int64)
        for name, readers in self.cuts.read_again:
            reads = np.searchsorted(readers, positions)  # how many are before each position
            again = reads[:, None, :] > reads[:, :, None]
            again &= positions[:, :, None] > readers[0]
            if again.any():
                nodes = list(self.writer.nodes(name)[0])
                sizes = self.running.states[:, nodes].sum(axis=1)
                found += sizes[:, None, None] * again
        return found

    def _at(self, running: NDArray[Any]) -> Any:
        return np.take_along_axis(running, self.positions, axis=1)

    def _crossing(self) -> Ints:
        """Bytes of a rank's tiles of the values that cross each cut: (P, C)."""
        found = np.zeros(self.positions.shape, np.int64)
        known: dict[str, Ints] = {}
        for position in np.unique(self.positions[:, 1:-1]).tolist():
            at = self.positions == position
            for name in self.cuts.crossing(position):
                if name not in known:
                    known[name] = self.writer.tile_bytes(name, self.running.points)
                found += known[name][:, None] * at
        return found
