"""Finds assignments between supported points of the frontier, which no weighted sum can find.

Paper: none of the four; path relinking (Glover 1997). Every step of a path is a candidate:
* paths between two neighbours on the hull: first whole connected components of the nodes in which
  they differ (independent of each other, hence in the order of bytes saved per second), then single
  nodes, in several orders;
* paths from one point along the best changes of single nodes, by the same ratio, no two adjacent.
Deviation: a heuristic; only the price of each point is exact.
Complexity: O(terms · K) for each gap.
Oracle: `eliminate.exact_frontier`, which no point may beat.
Known inefficiency: gaps of repeated layers repeat each other's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from shardwright.solve.algebra.frontier import reduce
from shardwright.solve.elimination.pricing import PriceList, best_points, sums
from shardwright.solve.elimination.problem import Floats, Ints, Point, Problem
from shardwright.solve.folding.folded import Folded
from shardwright.solve.gaps.path_relinking import RelinkingPath, components, relink
from shardwright.solve.gaps.single_changes import Moves

_ENOUGH = 4  # steps per requested point


def fill_gaps(
    problem: Problem | Folded | PriceList,
    supported: Sequence[Point],
    *,
    max_points: int = 1000,
    resolution: float = 0.0,
) -> tuple[Point, ...]:
    """The frontier of `supported`, fastest first, with points added up to about `max_points`.

    A gap gets points in proportion to its width, and at least one; a gap no wider than the fraction
    `resolution` of its time or memory gets none.
    """
    if not supported:
        return ()
    prices = PriceList.of(problem)
    moves = Moves.of(prices)
    blocks = [np.array([point.choice for point in supported], np.int64)]
    gaps = [
        (left, right)
        for left, right in pairwise(supported)
        if right.time > left.time * (1 + resolution)
        and left.memory > right.memory * (1 + resolution)
    ]
    widths = [_width(*gap) for gap in gaps]
    left_over = max_points - len(supported)
    for (left, right), width in zip(gaps, widths, strict=True):
        share = max(1, round(left_over * width / sum(widths)))
        blocks += _between(prices, moves, left, right, share)
    return best_points(prices, blocks)


def _width(left: Point, right: Point) -> float:
    """The relative distance of neighbours in time and in memory."""
    return (1 - left.time / right.time) + (1 - right.memory / left.memory)


def _between(
    prices: PriceList, moves: Moves, left: Point, right: Point, most: int
) -> Iterator[Ints]:
    """Up to `most` candidates between two neighbours, in blocks of assignments."""
    start, goal = np.array(left.choice, np.int64), np.array(right.choice, np.int64)
    mixtures = _mixtures(prices, start, goal)
    paths = [(left, next(mixtures))]
    if _num_between(left, right, paths[0][1]) < _ENOUGH * most:  # else there are enough candidates
        paths += [(left, w) for w in mixtures]
        paths.append((left, _single_changes(prices, moves, start, saves="memory")))
        paths.append((right, _single_changes(prices, moves, goal, saves="time")))
    time = np.concatenate([point.time + w.time for point, w in paths])
    memory = np.concatenate([point.memory + w.memory for point, w in paths])
    owner = np.repeat(np.arange(len(paths)), [len(w.time) for _, w in paths])
    turns = np.concatenate([np.arange(len(w.time)) for _, w in paths])
    inside = np.flatnonzero((time < right.time) & (memory < left.memory))
    trace = (owner[inside], turns[inside])
    front = reduce(np.array([0, len(inside)]), time[inside], memory[inside], trace)
    found = len(front.time)
    count = min(most, found)
    kept = ((np.arange(count) + 0.5) * found / count).astype(np.int64)  # evenly, without the ends
    owners, reached = (row[kept] for row in front.trace)
    for number in np.unique(owners):
        yield paths[number][1].assignments(reached[owners == number])


def _num_between(left: Point, right: Point, steps: RelinkingPath) -> int:
    """The number of steps of a path from `left` that lie between it and `right`."""
    time, memory = left.time + steps.time, left.memory + steps.memory
    inside = (time < right.time) & (memory < left.memory) & (memory > right.memory)
    return int(inside.sum())


def _mixtures(prices: PriceList, start: Ints, goal: Ints) -> Iterator[RelinkingPath]:
    """Paths from `start` to `goal`."""
    differs = start != goal
    component = components(prices, differs)
    by_ratio = _ranks(_group_costs(prices, start, goal, component), component)
    yield relink(prices, start, goal, by_ratio)
    nodes = np.flatnonzero(differs)
    alone = _ranks(_single_costs(prices, start, goal), np.arange(len(start)))
    for order in (
        nodes,
        nodes[::-1],
        nodes[np.argsort(by_ratio[nodes], kind="stable")],
        nodes[np.argsort(alone[nodes], kind="stable")],
    ):
        rank = np.zeros(len(start), np.int64)
        rank[order] = np.arange(len(order))
        yield relink(prices, start, goal, rank)


def _single_changes(prices: PriceList, moves: Moves, start: Ints, saves: str) -> RelinkingPath:
    """A path along the best single changes of `start` that save time or memory, as `saves` says."""
    time, memory = moves.costs(prices, start)
    spent, saved = (time, -memory) if saves == "memory" else (memory, -time)
    useful = np.flatnonzero((saved > 0) & np.isfinite(spent))
    useful = useful[np.argsort(spent[useful] / saved[useful], kind="stable")]
    nodes, first = np.unique(moves.node[useful], return_index=True)  # the best move of each node
    never = len(moves.node)
    rank = np.full(len(start), never)
    rank[nodes] = first
    # Of two adjacent nodes only the better one changes, so that the costs add up.
    edges = prices.tail != prices.head
    tail, head = prices.tail[edges], prices.head[edges]
    worse = np.where(rank[tail] < rank[head], head, tail)
    rank[worse[(rank[tail] < never) & (rank[head] < never)]] = never
    goal = start.copy()
    chosen = np.flatnonzero(rank < never)
    goal[chosen] = moves.choice[useful[rank[chosen]]]
    order = np.zeros(len(start), np.int64)
    order[chosen[np.argsort(rank[chosen])]] = np.arange(len(chosen))
    return relink(prices, start, goal, order)


_Costs = tuple[Floats, Floats]  # seconds and bytes that changing each group adds


def _group_costs(prices: PriceList, start: Ints, goal: Ints, group: Ints) -> _Costs:
    """The cost of changing each whole group, at the group's number: (nodes,).

    Groups must not be adjacent.
    """
    differs = start != goal
    owner = np.where(differs[prices.tail], group[prices.tail], group[prices.head])
    before, after = prices.entries_of(start), prices.entries_of(goal)
    return (
        sums(owner, prices.time[after] - prices.time[before], len(start)),
        sums(owner, prices.memory[after] - prices.memory[before], len(start)),
    )


def _single_costs(prices: PriceList, start: Ints, goal: Ints) -> _Costs:
    """The cost of changing each node alone: (nodes,)."""
    before, every = prices.entries_of(start), np.arange(len(prices.tail))
    heads = prices.entries(every, start[prices.tail], goal[prices.head])
    tails = prices.entries(
        every, goal[prices.tail], start[prices.head]
    )  # of a node's own term: no change

    def change(cost: Floats | Ints) -> Floats:
        num = len(start)
        as_head = sums(prices.head, cost[heads] - cost[before], num)
        return as_head + sums(prices.tail, cost[tails] - cost[before], num)

    return change(prices.time), change(prices.memory)


def _ranks(costs: _Costs, group: Ints) -> Ints:
    """The rank of each node when groups change in the order of their ratio of costs: (nodes,).

    First groups that save both, then by bytes saved per second, then those that cost both.
    """
    time, memory = costs
    angle = np.where(np.isfinite(time), np.arctan2(memory, time), np.inf)
    order = np.argsort(angle, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    return position[group]
