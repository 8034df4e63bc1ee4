"""Prices all assignments on a path that changes one group of nodes at a time (path relinking).

Paper: none of the four. A term of the price joins two nodes, so on a path it changes at most twice:
when its first node changes and when its second does. Prices of all n steps are a running sum.
Complexity: O(terms + turns). Oracle: `problem.price`.
Known inefficiency: prices are rounded running sums, good enough for selecting steps only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwright.solve.elimination.pricing import PriceList, sums
from shardwright.solve.elimination.problem import Floats, Ints


class RelinkingPath(NamedTuple):
    """After s steps a node has its choice in `goal` if its rank is below s, else in `start`."""

    start: Ints  # (nodes,)
    goal: Ints  # (nodes,)
    rank: Ints  # (nodes,)
    time: Floats  # (turns + 1,), in seconds above those of `start`; rounded
    memory: Ints  # (turns + 1,), in bytes above those of `start`

    def assignments(self, turns: Ints) -> Ints:
        """The assignments after each number of `turns`: (A, nodes)."""
        return np.where(self.rank < turns[:, None], self.goal, self.start)


def relink(prices: PriceList, start: Ints, goal: Ints, rank: Ints) -> RelinkingPath:
    """Price the path from `start` (allowed) to `goal` on which node v changes as number `rank[v]`.

    Ranks of nodes with equal choices in `start` and `goal` are ignored.
    """
    changes = start != goal
    terms = np.flatnonzero(changes[prices.tail] | changes[prices.head])
    tail, head = prices.tail[terms], prices.head[terms]
    first = np.minimum(rank[tail], rank[head])
    both = np.maximum(rank[tail], rank[head])
    entries = (
        prices.entries(terms, start[tail], start[head]),
        prices.entries(
            terms,
            np.where(rank[tail] == first, goal[tail], start[tail]),
            np.where(rank[head] == first, goal[head], start[head]),
        ),
        prices.entries(terms, goal[tail], goal[head]),
    )
    turns = int(rank[changes].max()) + 1 if changes.any() else 0
    when = np.minimum(np.concatenate((first, both)), turns)

    def totals(cost: Floats | Ints) -> Floats:
        before, between, after = (cost[entry] for entry in entries)
        change = np.concatenate((between - before, after - between))
        return np.concatenate(([0.0], np.cumsum(sums(when, change, turns + 1)[:turns])))

    forbidden = np.isinf(prices.time)  # an infinite time would stay in the running sum
    time = totals(np.where(forbidden, 0.0, prices.time))
    time[totals(forbidden.astype(np.int64)) > 0] = np.inf
    return RelinkingPath(start, goal, rank, time, totals(prices.memory).astype(np.int64))


def components(prices: PriceList, member: Ints) -> Ints:
    """The connected component, among the nodes with `member` true, of each node: (nodes,).

    Components are numbered by their first node, so equal numbers mean connected.
    """
    inside = np.flatnonzero(member[prices.tail] & member[prices.head])
    tail, head = prices.tail[inside], prices.head[inside]
    label = np.arange(len(member))
    while True:
        lowest = label.copy()
        np.minimum.at(lowest, label[tail], label[head])
        np.minimum.at(lowest, label[head], label[tail])
        lowest = lowest[lowest]
        if np.array_equal(lowest, label):
            return label
        label = lowest
