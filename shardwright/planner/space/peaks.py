"""Transient memory of plans: workspaces, and segments while they are recomputed.

They are maxima over a plan, not sums, so the search does not see them; they are added to the
points that it finds. During its backward pass a recomputed segment needs all bytes that it would
otherwise have kept.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np

from shardwright.planner.space.space import Space
from shardwright.solve.elimination.problem import Ints


@final
class Peaks:
    """Bytes on top of the sum, for whole assignments of `space`."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.like = space.folded.node_tables()  # whole node -> node of the problem
        self.first = np.cumsum([0, *(len(w) for w in space.workspaces[:-1])])[self.like]

    def at(self, choices: Ints) -> Ints:
        """Bytes for whole assignments: (P, nodes) -> (P,)."""
        transient = np.concatenate(self.space.workspaces)[self.first + choices].max(axis=1)
        found: Ints = transient + self._recomputed(choices)
        return found

    @cached_property
    def least(self) -> int:
        """Bytes that every assignment needs."""
        return max(int(workspace.min()) for workspace in self.space.workspaces)

    @cached_property
    def _recomputable(self) -> tuple[Ints, Ints, Ints]:
        """Whole nodes that have a twin, those twins, and the switch of each."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        triples = [
            (node, twin, both.switches[segment_of[node]]) for node, twin in both.twins.items()
        ]
        found = [np.array(triples, np.int64).reshape(-1, 3)]
        for number, run in enumerate(self.space.folded.runs):
            at = {node: i for i, node in enumerate(run.nodes)}
            inside = [[at[node] for node in triple] for triple in triples if triple[0] in at]
            rows = self.space.folded.places(number)[:-1]  # the last copy is the problem's own
            found.append(rows[:, np.array(inside, np.int64).reshape(-1, 3)].reshape(-1, 3))
        node, twin, switch = np.concatenate(found).T
        return node, twin, switch

    def _recomputed(self, choices: Ints) -> Ints:
        """Bytes of the largest recomputed segment, as if it were kept: (P,)."""
        node, twin, switch = self._recomputable
        if not node.size:
            return np.zeros(len(choices), np.int64)
        problem = self.space.problem
        again = choices[:, switch] == 1
        kept = choices.copy()
        kept[:, node] = np.where(again, choices[:, twin], choices[:, node])
        owner = np.full(choices.shape[1], -1)  # whole node -> the number of its segment
        segments, number = np.unique(switch, return_inverse=True)
        owner[node] = number
        totals = np.zeros((len(segments), len(choices)), np.int64)
        sizes = [part.memory.ravel() for part in problem.nodes]
        start = np.cumsum([0, *(len(size) for size in sizes[:-1])])
        bytes_of = np.concatenate(sizes)[start[self.like[node]] + kept[:, node]]
        np.add.at(totals, number, bytes_of.T)
        table, tail, head = self.space.folded.edge_ends()
        inside = owner[head] >= 0
        for e in np.unique(table[inside]).tolist():
            memory = problem.edges[e].memory
            if memory.any():
                at = (table == e) & inside
                moved = memory[kept[:, tail[at]], kept[:, head[at]]]
                np.add.at(totals, owner[head[at]], moved.T)
        largest: Ints = (totals.T * choices[:, segments]).max(axis=1)
        return largest
