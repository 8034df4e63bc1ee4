"""Costs of changing one node of an assignment, for every node and choice at once.

Paper: none of the four; the neighbourhood of a local search.
Complexity: O(terms · K). Oracle: `problem.price`.
Known inefficiency: all moves are priced again for each assignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.solve.elimination.pricing import PriceList, sums
from shardwright.solve.elimination.problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """All moves (node, choice) of a problem, and the cost entries that each of them changes."""

    node: Ints  # (moves,)
    choice: Ints  # (moves,)
    move: Ints  # (touched,), the move
    term: Ints  # (touched,), a term that it changes
    base: Ints  # (touched,), its cost entry when the node at the other end has choice 0
    other: Ints  # (touched,), the node at the other end
    step: Ints  # (touched,), entries from one choice of the other node to the next

    @classmethod
    def of(cls, prices: PriceList) -> Moves:
        """List the moves of the problem whose price list is `prices`."""
        sizes = prices.sizes
        first = np.cumsum(sizes) - sizes  # the first move of each node
        node = np.repeat(np.arange(len(sizes)), sizes)
        edges = np.arange(len(sizes), len(prices.tail))
        own = np.concatenate((prices.head, prices.tail[edges]))  # each term has its ends' moves
        term = np.concatenate((np.arange(len(prices.tail)), edges))
        other = np.concatenate((prices.tail, prices.head[edges]))
        own_step = np.concatenate((np.ones_like(prices.head), prices.stride[edges]))
        other_step = np.concatenate((prices.stride, np.ones_like(edges)))
        counts = sizes[own]
        which = np.repeat(np.arange(len(own)), counts)
        choice = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            node,
            np.arange(len(node)) - first[node],
            first[own[which]] + choice,
            term[which],
            prices.offset[term[which]] + own_step[which] * choice,
            other[which],
            other_step[which],
        )

    def costs(self, prices: PriceList, assignment: Ints) -> tuple[Floats, Floats]:
        """Seconds and bytes that each move adds to an allowed `assignment`: (moves,)."""
        now = prices.entries_of(assignment)[self.term]
        then = self.base + self.step * assignment[self.other]
        num = len(self.node)
        time = sums(self.move, prices.time[then] - prices.time[now], num)
        memory = sums(self.move, prices.memory[then] - prices.memory[now], num)
        return time, memory


def num_touched_terms(prices: PriceList) -> int:
    """The number of terms that all moves change: the work to price them once."""
    edges = np.arange(len(prices.sizes), len(prices.tail))
    touched = prices.sizes[prices.head].sum() + prices.sizes[prices.tail[edges]].sum()
    return int(touched)
