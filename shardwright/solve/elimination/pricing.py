"""Prices many assignments at once and selects the best.

Equal to `problem.price` to the last bit: both sum exactly and round once.
Oracle: `problem.price`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.solve.algebra.exact_sums import ExactSums
from shardwright.solve.algebra.frontier import reduce
from shardwright.solve.elimination.problem import Assignment, Floats, Ints, Point, Problem
from shardwright.solve.folding.folded import Folded


@dataclass(frozen=True, eq=False)
class PriceList:
    """All distinct cost tables of a problem, end to end, so that pricing is one gather.

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
    def of(cls, problem: Problem | Folded | PriceList) -> PriceList:
        """Collect the distinct tables of `problem`; a price list is returned as it is."""
        if isinstance(problem, PriceList):
            return problem
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
        """The index of the cost of each of `terms`, given the choices at its two ends."""
        return self.offset[terms] + self.stride[terms] * tail_choice + head_choice

    def entries_of(self, assignments: Ints) -> Ints:
        """The index of every term's cost: (..., nodes) -> (..., terms)."""
        found = np.take(assignments, self.tail, axis=-1)
        found *= self.stride
        found += self.offset
        found += np.take(assignments, self.head, axis=-1)
        return found

    @cached_property
    def _exact(self) -> ExactSums:
        return ExactSums(self.time)

    def priced(self, assignments: Ints) -> tuple[Floats, Ints]:
        """Exact prices, forbidden or not: (A, nodes) -> (A,), (A,)."""
        entries = self.entries_of(assignments)
        return self._exact.of(entries), self.memory[entries].sum(axis=1)

    def points(self, assignments: Ints) -> list[Point]:
        """Each of the assignments (A, nodes) with its exact price, forbidden or not."""
        time, memory = self.priced(assignments)
        rows = zip(time.tolist(), memory.tolist(), assignments.tolist(), strict=True)
        return [Point(t, m, tuple(x)) for t, m, x in rows]

    def point(self, assignment: Assignment) -> Point:
        """One assignment with its exact price, forbidden or not."""
        (found,) = self.points(np.array([assignment], np.int64))
        return found


def best_points(prices: PriceList, assignments: Iterable[Ints]) -> tuple[Point, ...]:
    """Price blocks of assignments (A, nodes) and keep those that no other beats, fastest first.

    Among equals the first is kept. Forbidden assignments are left out.
    """
    blocks = list(assignments)
    if not blocks:
        return ()
    choice = np.concatenate(blocks)
    time, memory = prices.priced(choice)
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
