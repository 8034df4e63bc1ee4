"""Segments of a problem that have one of two costs each, kept or recomputed as a whole.

A piece is there twice, once with the costs of either way, and in one of the two every node is
absent: a choice more, free of charge. A switch for each piece says in which. That keeps nodes and
edges all that a problem is made of, at twice the work for the inside of a piece.

Paper: none; recomputation as "one more choice per segment" of the frontier algebra of TensorOpt
(arXiv 2004.10856).
Oracle: the best over all combinations of ways, each a plain problem (`tests/unit/search`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np

from shardwright.solve.elimination.problem import Edge, Floats, Ints, Node, Problem


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """The nodes of the first way come first and in their order; a twin pays the second way.

    Nodes with a twin have one choice more, the last: absent. Choice 0 of a switch is the first
    way, choice 1 the second.
    """

    problem: Problem
    twins: Mapping[int, int]  # node -> its twin
    switches: Mapping[int, int]  # piece -> its switch


def twofold(first: Problem, second: Problem, piece: Mapping[int, int]) -> RecomputeChoice:
    """Join two problems of equal nodes and edges; `piece` says to which piece a node belongs.

    Nodes of no piece cost the same in both. An edge costs what the way of its head says, and where
    that has none, what the first way says.
    """
    if not piece:
        return RecomputeChoice(first, {}, {})
    maker = _Maker(first, second, piece)
    maker.nodes_of_both()
    for number, edge in enumerate(first.edges):
        maker.edge(edge, second.edges[number])
    maker.switch()
    return RecomputeChoice(Problem.unchecked(maker.nodes, maker.edges), maker.twins, maker.switches)


@final
@dataclass
class _Maker:
    first: Problem
    second: Problem
    piece: Mapping[int, int]
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    twins: dict[int, int] = field(default_factory=dict)
    switches: dict[int, int] = field(default_factory=dict)
    _known: dict[object, tuple[Floats, Ints]] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)  # what the keys of `_known` are made of

    def nodes_of_both(self) -> None:
        for i, node in enumerate(self.first.nodes):
            self.nodes.append(self._absentable(node) if i in self.piece else node)
        for i in sorted(self.piece):
            self.twins[i] = len(self.nodes)
            self.nodes.append(self._absentable(self.second.nodes[i]))
        silent = np.zeros(2), np.zeros(2, np.int64)
        for piece in sorted(set(self.piece.values())):
            self.switches[piece] = len(self.nodes)
            self.nodes.append(Node(f"recompute {piece}", *silent))

    def edge(self, one: Edge, other: Edge) -> None:
        """What an edge is between all that may be at its ends."""
        tail, head = self.piece.get(one.tail), self.piece.get(one.head)
        tails = [one.tail] if tail is None else [one.tail, self.twins[one.tail]]
        heads = [one.head] if head is None else [one.head, self.twins[one.head]]
        for a in tails:
            for b in heads:
                together = tail == head
                if tail is not None and together and (a == one.tail) != (b == one.head):
                    continue
                table = one if b == one.head else other
                found = self._padded(table, tail is not None, head is not None, together)
                self.edges.append(Edge(a, b, *found))

    def switch(self) -> None:
        """Tie a switch to every node through which its piece is tied to others, in both ways.

        One tie for each connected part would do. These keep a switch in place until the inside of
        its piece is eliminated: an early end would marry the two ways.
        """
        part = _parts(self.first, self.piece)
        tied = {part[node] for node in self.piece}
        for edge in self.first.edges:
            ends = {edge.tail, edge.head} & self.piece.keys()
            if len({self.piece.get(edge.tail), self.piece.get(edge.head)}) > 1:
                tied |= ends
        for node in sorted(tied):
            switch = self.switches[self.piece[node]]
            for way, there in enumerate((node, self.twins[node])):
                self.edges.append(Edge(switch, there, *self._present(self.nodes[there], way)))

    def _absentable(self, node: Node) -> Node:
        key = id(node.time), id(node.memory)
        if key not in self._known:
            self._known[key] = np.append(node.time, 0.0), np.append(node.memory, 0)
            self._alive.append(node)
        return Node(node.name, *self._known[key])

    def _padded(self, edge: Edge, tail: bool, head: bool, together: bool) -> tuple[Floats, Ints]:
        """A table with a row and a column more, for ends that may be absent."""
        if not (tail or head):
            return edge.time, edge.memory
        key = id(edge.time), id(edge.memory), tail, head, together
        if key not in self._known:
            rows, columns = edge.time.shape
            alone = np.inf if tail and head and together else 0.0
            time = np.full((rows + tail, columns + head), alone)
            memory = np.zeros(time.shape, np.int64)
            time[:rows, :columns], memory[:rows, :columns] = edge.time, edge.memory
            if tail and head:
                time[rows, columns] = 0.0
            self._known[key] = time, memory
            self._alive.append(edge)
        return self._known[key]

    def _present(self, node: Node, way: int) -> tuple[Floats, Ints]:
        key = "present", node.num_choices, way
        if key not in self._known:
            time = np.full((2, node.num_choices), np.inf)
            time[way, :-1] = 0.0
            time[1 - way, -1] = 0.0
            self._known[key] = time, np.zeros(time.shape, np.int64)
        return self._known[key]


def _parts(problem: Problem, piece: Mapping[int, int]) -> dict[int, int]:
    """For every node of a piece the first node that it is connected to inside its piece."""
    lowest = {node: node for node in piece}

    def root(node: int) -> int:
        while lowest[node] != node:
            lowest[node] = lowest[lowest[node]]
            node = lowest[node]
        return node

    for edge in problem.edges:
        if edge.tail in piece and piece[edge.tail] == piece.get(edge.head):
            a, b = sorted((root(edge.tail), root(edge.head)))
            lowest[b] = a
    return {node: root(node) for node in piece}
