"""Merges nodes that determine each other's choices before a problem is solved.

Operators that read the same value need it in the same layout, so few pairs of their choices are
allowed: of the operators of a batch norm, one for each choice. Eliminating one of them fills a
table over all neighbours of both, most of whose entries are forbidden. A merged node, whose choices
are the allowed pairs, avoids them. Two nodes are merged where the pairs are no more than the
choices of either, so that no table grows.

Paper: none of the four; functional elimination of variables, as in constraint networks.
Complexity: one gather for each table.
Known inefficiency: a node that is decided by a larger one, but not the other way round, stays.
Oracle: the same problem unmerged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from shardwright.solve.elimination.problem import Bools, Edge, Floats, Ints, Node, Problem
from shardwright.solve.folding.folded import Folded, FoldedChain


@dataclass(frozen=True, eq=False)
class Merged:
    """A problem with merged nodes, and the map of its choices to those of the original problem.

    Node i of the whole original problem takes `choices[offset[i] + k]` where node `position[i]` of
    the whole merged one takes k.
    """

    folded: Folded
    position: Ints  # (N,)
    offset: Ints  # (N,)
    choices: Ints

    def expand(self, choice: Ints) -> Ints:
        """Assignments of the original problem: (L, new nodes) -> (L, N)."""
        found: Ints = self.choices[self.offset + choice[:, self.position]]
        return found

    def originals(self, nodes: Sequence[int]) -> tuple[int, ...]:
        """The original nodes that were merged into `nodes`."""
        return tuple(np.flatnonzero(np.isin(self.position, list(nodes))).tolist())


def merge(folded: Folded) -> Merged:
    """The problem with nodes merged; entries and exits of runs are not merged."""
    groups = _Groups(folded)
    groups.merge_all()
    return groups.result()


@final
class _Groups:
    """Groups of merged nodes, each named by its first node."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        problem = folded.problem
        self.sizes = list(problem.sizes)
        self.group = list(range(len(self.sizes)))
        self.members = [[node] for node in self.group]
        self._memo: dict[object, Ints] = {}
        self._pairs: dict[object, tuple[Ints, Ints]] = {}
        self._tables: dict[object, tuple[Floats, Ints]] = {}
        self.choices = [
            self._all(size) for size in self.sizes
        ]  # of a node, per choice of its group
        # Only nodes of the same run, or of none, may be merged.
        self.side = [-1] * len(self.sizes)
        for number, run in enumerate(folded.runs):
            for node in run.nodes:
                self.side[node] = number
            self.side[run.entry] = self.side[run.exit] = -2
        self.finite: dict[int, Bools | None] = {}  # of edges' tables: where they forbid some pair
        self.tight: dict[tuple[int, int], list[tuple[int, Bools]]] = {}  # groups -> edges
        self.near: list[set[int]] = [set() for _ in self.sizes]
        for number, edge in enumerate(problem.edges):
            a, b = edge.tail, edge.head
            if self.side[a] != self.side[b] or self.side[a] == -2:
                continue
            if id(edge.time) not in self.finite:
                mask = np.isfinite(edge.time)
                self.finite[id(edge.time)] = None if mask.all() else mask
            known = self.finite[id(edge.time)]
            if known is not None:
                self._join(a, b, [(number, known)])

    def merge_all(self) -> None:
        """Merge pairs of groups until no more may be merged."""
        queue = sorted(self.tight)
        while queue:
            again: set[tuple[int, int]] = set()
            for pair in queue:
                if pair in self.tight and self._merge(*pair):
                    again.update(_ordered(pair[0], other) for other in self.near[pair[0]])
            queue = sorted(again)

    def _join(self, a: int, b: int, edges: list[tuple[int, Bools]]) -> None:
        self.tight.setdefault(_ordered(a, b), []).extend(edges)
        self.near[a].add(b)
        self.near[b].add(a)

    def _merge(self, a: int, b: int) -> bool:
        """Merge `b` into `a` if there are no more allowed pairs than choices of either."""
        rows, columns = self._allowed(a, b)
        if not 0 < len(rows) <= min(self.sizes[a], self.sizes[b]):
            return False
        for group, kept in ((a, rows), (b, columns)):
            for node in self.members[group]:
                self.choices[node] = self._combined(self.choices[node], kept)
        self.sizes[a] = len(rows)
        self.members[a] += self.members[b]
        for node in self.members[b]:
            self.group[node] = a
        del self.tight[_ordered(a, b)]
        self.near[a].discard(b)
        for other in self.near[b] - {a}:
            self.near[other].discard(b)
            self._join(a, other, self.tight.pop(_ordered(b, other)))
        self.near[b] = set()
        return True

    def _allowed(self, a: int, b: int) -> tuple[Ints, Ints]:
        """The pairs of choices of two groups that no edge between them forbids."""
        terms = []
        for number, mask in self.tight[a, b]:
            edge = self.folded.problem.edges[number]
            turned = self.group[edge.tail] != a
            one, other = (edge.head, edge.tail) if turned else (edge.tail, edge.head)
            terms.append((mask, turned, self.choices[one], self.choices[other]))
        key = tuple((id(mask), turned, id(rows), id(cols)) for mask, turned, rows, cols in terms)
        if key not in self._pairs:
            masks = [
                (mask.T if turned else mask)[rows[:, None], cols]
                for mask, turned, rows, cols in terms
            ]
            found = np.logical_and.reduce(masks).nonzero()
            self._pairs[key] = found[0], found[1]
        return self._pairs[key]

    def _all(self, size: int) -> Ints:
        if size not in self._memo:
            self._memo[size] = np.arange(size)
        return self._memo[size]

    def _combined(self, choices: Ints, kept: Ints) -> Ints:
        """`choices[kept]`, one array for equal arguments, so that equal tables are shared."""
        key = id(choices), id(kept)
        if key not in self._memo:
            self._memo[key] = choices[kept]
            self._memo[len(self._memo), "alive"] = choices  # what a key is made of
        return self._memo[key]

    def result(self) -> Merged:
        """The problem of groups: nodes of a group are one, and so are edges between two groups."""
        folded = self.folded
        problem = folded.problem
        firsts = sorted(set(self.group))
        number = {first: i for i, first in enumerate(firsts)}
        edges: list[Edge] = []
        moved: dict[int, int] = {}
        inside: dict[int, list[Edge]] = {}
        for e, edge in enumerate(problem.edges):
            a, b = self.group[edge.tail], self.group[edge.head]
            if a == b:
                inside.setdefault(a, []).append(edge)
                continue
            moved[e] = len(edges)
            edges.append(Edge(number[a], number[b], *self._between(edge)))
        nodes = tuple(self._node(first, inside.get(first, ())) for first in firsts)
        runs = tuple(
            FoldedChain(
                tuple(sorted({number[self.group[node]] for node in run.nodes})),
                number[run.entry],
                number[run.exit],
                run.count,
                frozenset(moved[e] for e in run.after),
            )
            for run in folded.runs
        )
        new = Folded(Problem.unchecked(nodes, edges), runs)
        position = [np.array([number[group] for group in self.group])]
        for i, (run, other) in enumerate(zip(folded.runs, new.runs, strict=True)):
            at = {node: j for j, node in enumerate(other.nodes)}
            columns = [at[int(position[0][node])] for node in run.nodes]
            position.append(new.positions(i)[:-1, columns].ravel())
        starts = np.cumsum([0, *(len(c) for c in self.choices)])
        offset = starts[:-1][folded.node_tables()]
        return Merged(new, np.concatenate(position), offset, np.concatenate(self.choices))

    def _between(self, edge: Edge) -> tuple[Floats, Ints]:
        """An edge's table over the choices of two groups."""
        tails, heads = self.choices[edge.tail], self.choices[edge.head]
        if self._is_whole(edge.tail) and self._is_whole(edge.head):
            return edge.time, edge.memory
        key = id(edge.time), id(edge.memory), id(tails), id(heads)
        if key not in self._tables:
            at = tails[:, None], heads
            self._tables[key] = edge.time[at], edge.memory[at]
        return self._tables[key]

    def _node(self, first: int, inside: Sequence[Edge]) -> Node:
        """The merged node, with the costs of all nodes and edges inside of the group."""
        problem = self.folded.problem
        if self._is_whole(first) and len(self.members[first]) == 1:
            return problem.nodes[first]
        own = [problem.nodes[node] for node in self.members[first]]
        maps = [self.choices[node] for node in self.members[first]]
        ends = [(self.choices[edge.tail], self.choices[edge.head]) for edge in inside]
        key = (
            *((id(n.time), id(n.memory), id(kept)) for n, kept in zip(own, maps, strict=True)),
            *(
                (id(e.time), id(e.memory), id(a), id(b))
                for e, (a, b) in zip(inside, ends, strict=True)
            ),
        )  # fmt: skip
        if key not in self._tables:
            time, memory = np.zeros(self.sizes[first]), np.zeros(self.sizes[first], np.int64)
            for node, kept in zip(own, maps, strict=True):
                time, memory = time + node.time[kept], memory + node.memory[kept]
            for edge, pair in zip(inside, ends, strict=True):
                time, memory = time + edge.time[pair], memory + edge.memory[pair]
            self._tables[key] = time, memory
        return Node(own[0].name, *self._tables[key])

    def _is_whole(self, node: int) -> bool:
        return self.choices[node] is self._memo[self.folded.problem.nodes[node].num_choices]


def _ordered(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)
