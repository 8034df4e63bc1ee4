"""Prices of many assignments at once, and the best among them.

It agrees with `problem.price` to the last bit: both sum exactly and round once.
Oracle: `problem.price`. Known inefficiency: exact sums are made one row at a time in Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwright.search.folded import Folded
from shardwright.search.frontier import reduce
from shardwright.search.problem import Assignment, Floats, Ints, Point, Problem


@dataclass(frozen=True, slots=True, eq=False)
class PriceList:
    """All distinct cost tables of a problem end to end, so that a price is one gather.

    Term t of assignment x costs `time[offset[t] + stride[t] * x[tail[t]] + x[head[t]]]`. The first
    terms are the nodes (tail = head = the node, stride 0), the others the edges.
    """

    time: Floats  # (entries,)
    memory: Ints  # (entries,)
    offset: Ints  # (terms,)
    stride: Ints  # (terms,)
    tail: Ints  # (terms,)
    head: Ints  # (terms,)
    sizes: Ints  # (nodes,), numbers of choices

    @classmethod
    def of(cls, problem: Problem | Folded) -> PriceList:
        """Collect the tables of `problem`, each distinct one once."""
        folded = Folded.of(problem)
        parts = folded.problem.parts
        times: list[Floats] = []
        memories: list[Ints] = []
        starts: dict[tuple[int, int], int] = {}
        length = 0
        offsets = []
        for part in parts:
            key = (id(part.time), id(part.memory))
            if key not in starts:
                starts[key] = length
                length += part.time.size
                times.append(part.time.ravel())
                memories.append(part.memory.ravel())
            offsets.append(starts[key])
        num = len(folded.problem.nodes)
        strides = [0] * num + [edge.time.shape[1] for edge in folded.problem.edges]
        tables = folded.node_tables()
        edges, tail, head = folded.edge_ends()
        terms, nodes = np.concatenate((tables, num + edges)), np.arange(len(tables))
        return cls(
            np.concatenate(times),
            np.concatenate(memories),
            np.array(offsets, np.int64)[terms],
            np.array(strides, np.int64)[terms],
            np.concatenate((nodes, tail)),
            np.concatenate((nodes, head)),
            np.array(folded.problem.sizes)[tables],
        )

    def entries(self, terms: Ints, tail_choice: Ints, head_choice: Ints) -> Ints:
        """Where the cost of each of `terms` stands, given the choices at its two ends."""
        return self.offset[terms] + self.stride[terms] * tail_choice + head_choice

    def entries_of(self, assignments: Ints) -> Ints:
        """Where every term's cost stands: (..., nodes) -> (..., terms)."""
        tails = self.stride * assignments[..., self.tail]
        return self.offset + tails + assignments[..., self.head]

    def point(self, assignment: Assignment) -> Point:
        """One assignment with its exact price, forbidden or not."""
        entries = self.entries_of(np.array(assignment, np.int64))
        time = math.fsum(self.time[entries].tolist())
        return Point(time, int(self.memory[entries].sum()), assignment)


def best_points(prices: PriceList, assignments: Iterable[Ints]) -> tuple[Point, ...]:
    """Price blocks of assignments (A, nodes) and keep those that no other beats, fastest first.

    Of equals the first given is kept. Forbidden assignments are left out.
    """
    rows: list[Ints] = []
    times: list[Floats] = []
    memories: list[Ints] = []
    for block in assignments:
        entries = prices.entries_of(block)
        rows.append(block)
        times.append(np.array([math.fsum(t) for t in prices.time[entries].tolist()]))
        memories.append(prices.memory[entries].sum(axis=1))
    if not rows:
        return ()
    choice, time, memory = np.concatenate(rows), np.concatenate(times), np.concatenate(memories)
    front = reduce(np.array([0, len(time)]), time, memory, (np.arange(len(time)),))
    picked = front.trace[0]
    return tuple(
        Point(t, m, tuple(x))
        for t, m, x in zip(
            front.time.tolist(), front.memory.tolist(), choice[picked].tolist(), strict=True
        )
    )


def sums(where: Ints, amounts: Floats | Ints, num: int) -> Floats:
    """Entry i is the sum of the amounts whose `where` is i: (num,). Bytes stay exact."""
    return np.bincount(where, amounts, num).astype(np.float64, copy=False)
