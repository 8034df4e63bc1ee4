"""Segments of a problem that have one of two costs each, kept or recomputed as a whole.

Every segment is in the problem twice, once kept and once recomputed. Its nodes have an extra
choice, absent, which costs nothing, and in one of the two copies all nodes are absent. A switch
node for each segment decides in which. The result is an ordinary problem of nodes and edges, at
twice the work for the inside of a segment.

Inside of a recomputed segment single operators may be kept. Each of these decisions is a node of
its own with one edge, to the twin of the operator's node. Elimination folds it into that node
first, so it adds next to no work. Likewise the one input that a recomputed segment keeps may wait
in the memory of the host: a node with an edge to what makes it and one to what reads it, which have
an edge anyway.

Paper: none; recomputation as "one more choice per segment" of the frontier algebra of TensorOpt
(arXiv 2004.10856).
Oracle: the best over all combinations, each a plain problem (`tests/unit/solve/elimination`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from shardwright.solve.elimination.problem import Edge, Floats, Ints, Node, Problem


@dataclass(frozen=True, slots=True, eq=False)
class KeepChoice:
    """Whether an operator runs again or is kept, if the segment of its node is recomputed.

    Both cost `time` and `memory` for each choice of the node, in addition to the second problem's:
    column 0 if the operator runs again, column 1 if it is kept.
    """

    name: str
    node: int
    time: Floats  # (K, 2)
    memory: Ints  # (K, 2)


@dataclass(frozen=True, slots=True, eq=False)
class HostChoice:
    """Whether the input of a segment waits on the device or on the host, if it is recomputed.

    Both cost `time` and `memory` for each choice of `source`, the node that makes the input, in
    addition to the second problem's: column 0 on the device, column 1 on the host. `reader` is the
    node of the segment that reads it.
    """

    name: str
    source: int
    reader: int
    time: Floats  # (K, 2)
    memory: Ints  # (K, 2)


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """A problem of two alternatives for each segment.

    The nodes of the first problem come first, in order; their twins have the costs of the second.
    Nodes with a twin have one more choice, the last: absent. Choice 0 of a switch selects the
    first problem's costs, choice 1 the second's. Choice 1 of a node of `keeps` keeps an operator,
    choice 1 of a node of `hosts` moves an input to the host; these have a third choice, absent,
    where the segment is kept.
    """

    problem: Problem
    twins: Mapping[int, int]  # node -> its twin
    switches: Mapping[int, int]  # segment -> its switch
    keeps: tuple[int, ...] = ()  # the node of each `KeepChoice`, in their order
    hosts: tuple[int, ...] = ()  # the node of each `HostChoice`, in their order


def with_recompute_choice(
    first: Problem,
    second: Problem,
    segment: Mapping[int, int],
    keepable: Sequence[KeepChoice] = (),
    movable: Sequence[HostChoice] = (),
) -> RecomputeChoice:
    """Join two problems with the same nodes and edges; `segment` maps a node to its segment.

    Nodes outside of segments must cost the same in both. An edge has the costs of the alternative
    of its head; if that is in no segment, of the first problem. Nodes of `keepable`, and
    readers of `movable`, are in segments.
    """
    if not segment:
        return RecomputeChoice(first, {}, {})
    maker = _RecomputeBuilder(first, second, segment)
    maker.add_nodes()
    for number, edge in enumerate(first.edges):
        maker.edge(edge, second.edges[number])
    maker.switch()
    keeps = tuple([maker.keep(choice) for choice in keepable])
    hosts = tuple([maker.host(choice) for choice in movable])
    problem = Problem.unchecked(maker.nodes, maker.edges)
    return RecomputeChoice(problem, maker.twins, maker.switches, keeps, hosts)


@final
@dataclass
class _RecomputeBuilder:
    first: Problem
    second: Problem
    segment: Mapping[int, int]
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    twins: dict[int, int] = field(default_factory=dict)
    switches: dict[int, int] = field(default_factory=dict)
    _known: dict[object, tuple[Floats, Ints]] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)  # what the keys of `_known` are made of

    def add_nodes(self) -> None:
        for i, node in enumerate(self.first.nodes):
            self.nodes.append(self._with_absent_choice(node) if i in self.segment else node)
        for i in sorted(self.segment):
            self.twins[i] = len(self.nodes)
            self.nodes.append(self._with_absent_choice(self.second.nodes[i]))
        silent = np.zeros(2), np.zeros(2, np.int64)
        for segment in sorted(set(self.segment.values())):
            self.switches[segment] = len(self.nodes)
            self.nodes.append(Node(f"recompute {segment}", *silent))

    def edge(self, one: Edge, other: Edge) -> None:
        """Add an edge for every combination of copies at its ends."""
        tail, head = self.segment.get(one.tail), self.segment.get(one.head)
        tails = [one.tail] if tail is None else [one.tail, self.twins[one.tail]]
        heads = [one.head] if head is None else [one.head, self.twins[one.head]]
        for a in tails:
            for b in heads:
                is_same_segment = tail == head
                if tail is not None and is_same_segment and (a == one.tail) != (b == one.head):
                    continue
                table = one if b == one.head else other
                found = self._with_absent_ends(
                    table, tail is not None, head is not None, is_same_segment
                )
                self.edges.append(Edge(a, b, *found))

    def switch(self) -> None:
        """Join a switch to every node of its segment with edges to the outside, in both copies.

        One edge for each connected component would suffice. These keep the switch in the graph
        until the inside of its segment is eliminated: eliminating it earlier would join both
        copies in one table.
        """
        part = _first_in_component(self.first, self.segment)
        tied = {part[node] for node in self.segment}
        for edge in self.first.edges:
            ends = {edge.tail, edge.head} & self.segment.keys()
            if len({self.segment.get(edge.tail), self.segment.get(edge.head)}) > 1:
                tied |= ends
        for node in sorted(tied):
            switch = self.switches[self.segment[node]]
            for way, there in enumerate((node, self.twins[node])):
                self.edges.append(Edge(switch, there, *self._present(self.nodes[there], way)))

    def keep(self, choice: KeepChoice) -> int:
        """Add the node that decides whether an operator is kept, and its edge."""
        twin, number = self.twins[choice.node], len(self.nodes)
        self.nodes.append(Node(f"keep {choice.name}", np.zeros(2), np.zeros(2, np.int64)))
        edge = Edge(twin, number, choice.time, choice.memory)
        table = self._with_absent_ends(edge, True, False, False)
        self.edges.append(Edge(twin, number, *table))
        return number

    def host(self, choice: HostChoice) -> int:
        """Add the node that decides where an input waits, and its edges."""
        number, twin = len(self.nodes), self.twins[choice.reader]
        self.nodes.append(Node(f"host {choice.name}", np.zeros(3), np.zeros(3, np.int64)))
        inside = choice.source in self.segment
        edge = Edge(choice.source, number, choice.time, choice.memory)
        table = self._with_absent_ends(edge, inside, True, False)
        for source in [choice.source, *([self.twins[choice.source]] if inside else [])]:
            self.edges.append(Edge(source, number, *table))
        self.edges.append(Edge(twin, number, *self._waits(self.nodes[twin])))
        return number

    def _waits(self, reader: Node) -> tuple[Floats, Ints]:
        """The table that makes an input wait exactly where its reader is present."""
        key = "waits", reader.num_choices
        if key not in self._known:
            time = np.zeros((reader.num_choices, 3))
            time[:-1, 2] = np.inf
            time[-1, :2] = np.inf
            self._known[key] = time, np.zeros(time.shape, np.int64)
        return self._known[key]

    def _with_absent_choice(self, node: Node) -> Node:
        key = id(node.time), id(node.memory)
        if key not in self._known:
            self._known[key] = np.append(node.time, 0.0), np.append(node.memory, 0)
            self._alive.append(node)
        return Node(node.name, *self._known[key])

    def _with_absent_ends(
        self, edge: Edge, tail: bool, head: bool, is_same_segment: bool
    ) -> tuple[Floats, Ints]:
        """The table of an edge with a row or column added for each end that may be absent."""
        if not (tail or head):
            return edge.time, edge.memory
        key = id(edge.time), id(edge.memory), tail, head, is_same_segment
        if key not in self._known:
            rows, columns = edge.time.shape
            alone = np.inf if tail and head and is_same_segment else 0.0
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


def _first_in_component(problem: Problem, segment: Mapping[int, int]) -> dict[int, int]:
    """For every node of a segment, the first node of its connected component in the segment."""
    lowest = {node: node for node in segment}

    def root(node: int) -> int:
        while lowest[node] != node:
            lowest[node] = lowest[lowest[node]]
            node = lowest[node]
        return node

    for edge in problem.edges:
        if edge.tail in segment and segment[edge.tail] == segment.get(edge.head):
            a, b = sorted((root(edge.tail), root(edge.head)))
            lowest[b] = a
    return {node: root(node) for node in segment}
