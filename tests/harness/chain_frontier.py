"""The exact frontier of a chain by dynamic programming from left to right.

Paper: TensorOpt / FT (arXiv 2004.10856), LDP, the linear dynamic program.
Deviation: none. `best[k]` is the frontier of all prefixes whose last node chooses k; what follows
depends on a prefix only through k, so reducing it is safe.
Complexity: K² products of a frontier and a point for each node, and K live frontiers.
Oracle: `eliminate.exact_frontier`, which must agree exactly, and `tests/harness/oracles.py`.
Known inefficiency: traces of all prefixes are kept until the end.
"""

from __future__ import annotations

import numpy as np

from shardwright.solve.algebra.frontier import Frontiers, product, singletons, take, union
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Edge, Ints, Point, Problem, ProblemError


def chain_frontier(problem: Problem, *, memory_limit: int | None = None) -> tuple[Point, ...]:
    """Find every non-dominated (time, memory) of a chain, with one assignment for each.

    Every edge must join two neighbours in node order; any number may join the same two, or none.
    """
    edges = _edges_by_tail(problem)
    first = problem.nodes[0]
    best = singletons(first.time, first.memory, memory_limit)
    traces: list[tuple[Ints, Ints]] = []  # of each prefix: its shorter prefix, the choice before
    for number in range(1, len(problem.nodes)):
        best = _extend(problem, best, number, edges.get(number - 1, []), memory_limit)
        traces.append((best.trace[0], best.trace[-1]))
    last = np.repeat(np.arange(len(best)), best.lengths)
    choice = _unroll(last, traces)
    return best_points(PriceList.of(problem), [choice])


def _edges_by_tail(problem: Problem) -> dict[int, list[Edge]]:
    edges: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        if abs(edge.head - edge.tail) != 1:
            raise ProblemError(
                f"edge {edge.tail} -> {edge.head} skips nodes, but a chain joins each node to the "
                "next only; use exact_frontier"
            )
        edges.setdefault(min(edge.tail, edge.head), []).append(edge)
    return edges


def _extend(
    problem: Problem, best: Frontiers, number: int, edges: list[Edge], limit: int | None
) -> Frontiers:
    """`best` of one more node: `best'[b] = reduce ∪_a best[a] ⊗ E(a, b) ⊗ N(b)`."""
    node, before = problem.nodes[number], problem.sizes[number - 1]
    b, a = np.indices((node.num_choices, before)).reshape(2, -1)  # cell (b, a), a fastest
    result = take(best, a)
    result = product(result, singletons(node.time, node.memory), b, limit)
    for edge in edges:
        cells = a * node.num_choices + b if edge.tail < edge.head else b * before + a
        result = product(result, singletons(edge.time, edge.memory), cells, limit)
    return union(result.traced(np.repeat(a, result.lengths)), before)


def _unroll(last: Ints, traces: list[tuple[Ints, Ints]]) -> Ints:
    """Follow the traces back from every point of the last node: (points, nodes)."""
    columns = [last]
    points = np.arange(len(last))
    for prefix, before in reversed(traces):
        columns.append(before[points])
        points = prefix[points]
    return np.stack(columns[::-1], axis=1)
