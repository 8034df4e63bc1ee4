"""Transient memory of plans: operator workspaces, and activations of recomputed segments.

Transient memory is a maximum over a plan, not a sum, so the search does not optimise it; it is
added to the points found. During its backward pass a recomputed segment holds the activations that
it would otherwise have kept since the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import final

import numpy as np

from shardwright.planner.space.space import Space
from shardwright.solve.elimination.problem import Floats, Ints, Node, Problem


@final
class Peaks:
    """Computes transient bytes, which add to the summed bytes, of whole assignments of `space`."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.problem_node = space.folded.node_tables()  # whole node -> node of the problem
        sizes = [node.num_choices for node in space.problem.nodes]
        self.first = np.cumsum([0, *sizes[:-1]])[self.problem_node]

    def at(self, choices: Ints) -> Ints:
        """Bytes for whole assignments: (P, nodes) -> (P,)."""
        transient = np.concatenate(self.space.workspaces)[self.first + choices].max(axis=1)
        found: Ints = transient + self._recomputed(choices)
        return found

    @cached_property
    def least(self) -> int:
        """Bytes that every assignment needs."""
        return max(int(workspace.min()) for workspace in self.space.workspaces)

    def of_one_choice(self, choice: tuple[int, ...]) -> int:
        """Transient bytes of the choice that needs most in a whole assignment."""
        return int(np.concatenate(self._alone)[self.first + np.array(choice)].max())

    def below(self, most: int) -> Space | None:
        """The space without the choices that alone need `most` transient bytes or more.

        Choices keep their indices. Returns None if a node has no choice left.
        """
        known: dict[tuple[int, int], Floats] = {}  # nodes with equal tables still share them
        nodes = []
        for node, alone in zip(self.space.problem.nodes, self._alone, strict=True):
            key = id(node.time), id(alone)
            if key not in known:
                known[key] = np.where(alone < most, node.time, np.inf)
                known[key].setflags(write=False)
            if not np.isfinite(known[key]).any():
                return None
            nodes.append(Node(node.name, known[key], node.memory))
        problem = Problem.unchecked(nodes, self.space.problem.edges)
        return replace(self.space, folded=replace(self.space.folded, problem=problem))

    @cached_property
    def _alone(self) -> tuple[Ints, ...]:
        """Transient bytes of each choice of each node: its workspace, or the activations that it
        would keep if it were not recomputed.
        """
        nodes, sizes = self.space.problem.nodes, list(self.space.workspaces)
        for node, twin in self.space.recompute_choice.twins.items():
            again = np.maximum(nodes[node].memory - nodes[twin].memory, 0)
            sizes[twin] = sizes[twin] + again
        shared: dict[bytes, Ints] = {}
        return tuple(shared.setdefault(size.tobytes(), size) for size in sizes)

    @cached_property
    def _recomputable(self) -> tuple[Ints, Ints, Ints]:
        """Nodes of whole assignments that have a twin, their twins, and their switches."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        node, twin, switch = self._everywhere(
            [(node, twin, both.switches[segment_of[node]]) for node, twin in both.twins.items()], 3
        )
        return node, twin, switch

    @cached_property
    def _keeping(self) -> tuple[Ints, Ints]:
        """Nodes of whole assignments that keep operators, and the switches of their segments."""
        both, segment_of = self.space.recompute_choice, self.space.segment_of
        kept = zip(self.space.kept_operators, both.keeps, strict=True)
        pairs = [(keep, both.switches[segment_of[one.choice.node]]) for one, keep in kept]
        keep, switch = self._everywhere(pairs, 2)
        return keep, switch

    @cached_property
    def _waiting(self) -> tuple[Ints, Ints]:
        """Nodes of whole assignments that say where inputs wait, and their segments' switches."""
        both = self.space.recompute_choice
        hosts = zip(self.space.host_inputs, both.hosts, strict=True)
        node, switch = self._everywhere([(n, both.switches[one.segment]) for one, n in hosts], 2)
        return node, switch

    def _everywhere(self, groups: Sequence[tuple[int, ...]], size: int) -> Ints:
        """Groups of `size` nodes of the problem, as nodes of all copies: (size, groups)."""
        found = [np.array(groups, np.int64).reshape(-1, size)]
        for number, run in enumerate(self.space.folded.runs):
            at = {node: i for i, node in enumerate(run.nodes)}
            inside = [[at[node] for node in group] for group in groups if group[0] in at]
            rows = self.space.folded.positions(number)[:-1]  # the last copy is the problem's own
            found.append(rows[:, np.array(inside, np.int64).reshape(-1, size)].reshape(-1, size))
        return np.concatenate(found).T

    def _recomputed(self, choices: Ints) -> Ints:
        """Bytes that the largest recomputed segment would keep, less what it keeps: (P,)."""
        node, twin, switch = self._recomputable
        if not node.size:
            return np.zeros(len(choices), np.int64)
        segments, number = np.unique(switch, return_inverse=True)
        keep, wait = self._keeping, self._waiting
        beside = np.concatenate([keep[0], wait[0]])  # what is on the device beside the twins
        own = np.searchsorted(segments, np.concatenate([keep[1], wait[1]]))
        kept = choices.copy()
        kept[:, node] = np.where(choices[:, switch] == 1, choices[:, twin], choices[:, node])
        kept[:, twin] = self._sizes[twin] - 1  # absent
        more = self._kept_bytes(kept, dict(zip(node.tolist(), number.tolist(), strict=True)))
        keeping = dict(zip(beside.tolist(), own.tolist(), strict=True))
        twins = dict(zip(twin.tolist(), number.tolist(), strict=True))
        less = self._kept_bytes(choices, twins | keeping)
        largest: Ints = np.maximum((more - less).T * choices[:, segments], 0).max(axis=1)
        return largest

    @cached_property
    def _sizes(self) -> Ints:
        """The number of choices of each whole node."""
        return np.array(self.space.problem.sizes)[self.problem_node]

    def _kept_bytes(self, choices: Ints, owner: Mapping[int, int]) -> Ints:
        """Bytes of some nodes and of the edges to them, by their owner: (owners, P)."""
        problem = self.space.problem
        owners = np.full(choices.shape[1], -1)
        nodes = np.fromiter(owner, np.int64, len(owner))
        owners[nodes] = np.fromiter(owner.values(), np.int64, len(owner))
        memory = np.concatenate([part.memory for part in problem.nodes])
        totals = np.zeros((int(owners.max()) + 1, len(choices)), np.int64)
        np.add.at(totals, owners[nodes], memory[self.first[nodes] + choices[:, nodes]].T)
        table, tail, head = self.space.folded.edge_ends()
        inside = owners[head] >= 0
        for e in np.unique(table[inside]).tolist():
            sizes = problem.edges[e].memory
            if sizes.any():
                at = (table == e) & inside
                moved = sizes[choices[:, tail[at]], choices[:, head[at]]]
                np.add.at(totals, owners[head[at]], moved.T)
        return totals
