"""The space of plans on one mesh, as a search problem: what every operator and parameter may do.

A node is a cluster of operators (`clusters.py`) with the options of its leader,
or a parameter with its possible storage layouts; an edge is a value that one
writes and the other reads. Operators of one kind that read the same value, as
the three projections of an attention do, read it through one node more: they
agree on a layout, into which the value is brought once. Storage sharded over
devices (ZeRO, FSDP) is nothing special: a parameter stored as a Shard and read
as Replicate pays its gather on the edge, and its gradient the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from shardwright.cost.codes import decode, storable
from shardwright.cost.model import CostModel, Want
from shardwright.ir.graph import Leaf, LeafKind, Op
from shardwright.ir.layout import Atoms, Layout, Mesh
from shardwright.rules.rule import Tiling
from shardwright.search.clusters import Clusters, Place
from shardwright.search.folded import Folded
from shardwright.search.folding import fold
from shardwright.search.problem import Assignment, Edge, Floats, Ints, Node, Problem
from shardwright.search.repeats import Repeat


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Readers of one value that read it in the same layout: choice k is `want`'s number k."""

    value: str
    readers: tuple[Op, ...]
    want: Want


@dataclass(frozen=True, eq=False)
class Space:
    """A problem and what its choices mean.

    Nodes are clusters, then readings, then parameters. `places` has every
    operator, `storage_codes[i]` the layouts that parameter i may be stored in.
    """

    model: CostModel
    places: Mapping[str, Place]
    readings: tuple[Reading, ...]
    parameters: tuple[Leaf, ...]
    storage_codes: tuple[Ints, ...]
    folded: Folded

    @property
    def problem(self) -> Problem:
        """The problem, each run of repeats once."""
        return self.folded.problem

    @property
    def first_parameter(self) -> int:
        """The node of the first parameter."""
        return len(self.problem.nodes) - len(self.parameters)

    @property
    def first_reading(self) -> int:
        """The node of the first reading."""
        return self.first_parameter - len(self.readings)

    def tilings(self, choice: Sequence[int]) -> dict[str, Tiling]:
        """Tiling of every operator under an assignment of `problem`."""
        rules = self.model.analysis.rules
        return {
            op.name: self.model.options(op).tiling(
                rules[op.name], self.places[op.name].option_of(choice)
            )
            for op in self.model.graph.ops
        }

    def storage(self, choice: Sequence[int]) -> dict[str, Layout]:
        """Storage layout of every parameter under an assignment of `problem`."""
        mine = choice[self.first_parameter :]
        return {
            leaf.name: self.model.layout(leaf.name, int(codes[k]))
            for leaf, codes, k in zip(self.parameters, self.storage_codes, mine, strict=False)
        }

    @cached_property
    def workspaces(self) -> tuple[Ints, ...]:
        """Bytes of the largest workspace among the operators of each node, per choice."""
        found = [np.zeros(node.num_choices, np.int64) for node in self.problem.nodes]
        for op in self.model.graph.ops:
            place = self.places[op.name]
            mine = self.model.workspace(op)[place.options]
            for node in range(len(found)) if place.node is None else (place.node,):
                found[node] = np.maximum(found[node], mine)
        return tuple(found)

    def assignment(self, options: Mapping[str, int], storage: Mapping[str, int]) -> Assignment:
        """The choices that come closest to these: leaders decide for those that follow them.

        Where readers that must agree do not, the first is right.
        """
        choice = [0] * len(self.problem.nodes)
        for name, place in self.places.items():
            if place.leads:
                choice[place.own_node] = options[name]
        for i, reading in enumerate(self.readings, self.first_reading):
            choice[i] = self._agree(reading, i, choice)
        for i, (leaf, codes) in enumerate(zip(self.parameters, self.storage_codes, strict=True)):
            choice[self.first_parameter + i] = codes.tolist().index(storage[leaf.name])
        return tuple(choice)

    def _agree(self, reading: Reading, node: int, choice: list[int]) -> int:
        edges = [edge for edge in self.problem.edges if edge.tail == node]
        first, *others = edges
        agreed = int(np.isfinite(first.time[:, choice[first.head]]).argmax())
        for edge in others:
            if not np.isfinite(edge.time[agreed, choice[edge.head]]):
                allowed = np.where(np.isfinite(edge.time[agreed]), 0.0, np.inf)
                choice[edge.head] = int((allowed + self.problem.nodes[edge.head].time).argmin())
        return agreed


def make_space(model: CostModel) -> Space:
    """Every feasible tiling and storage of the model's graph on its mesh, with their costs."""
    space = make_folded_space(model, (), ())
    assert space is not None, "a space without repeats is never refused"
    return space


def make_folded_space(
    model: CostModel, repeats: Sequence[Repeat], skipped: Sequence[int]
) -> Space | None:
    """The space of a graph in which the second of three copies stands for `1 + skipped`.

    None if `repeats` do not repeat in the space as they do in the graph.
    """
    maker = _Maker(model)
    maker.operators()
    maker.parameters()
    problem = Problem(tuple(maker.nodes), tuple(maker.edges))
    folded = fold(problem, maker.homes, repeats, skipped)
    if folded is None:
        return None
    return Space(
        model,
        maker.clusters.places,
        tuple(maker.readings),
        maker.leaves,
        tuple(maker.storage),
        folded,
    )


def storage_layouts(atoms: Atoms, mesh: Mesh) -> list[Layout]:
    """How a parameter may be stored: along each axis replicated, or one of its atoms sharded."""
    return [decode(code, atoms, mesh) for code in storable(atoms, mesh).tolist()]


@dataclass
class _Maker:
    """A problem while it is made."""

    model: CostModel
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    homes: list[frozenset[int]] = field(default_factory=list)  # operators that a node belongs to
    readings: list[Reading] = field(default_factory=list)
    storage: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.leaves = graph.leaves_of(LeafKind.PARAMETER)
        self.clusters = Clusters(self.model)
        self.number = {op.name: i for i, op in enumerate(graph.ops)}
        self.reads: dict[tuple[str, str], int] = {}  # (value, reader) -> node of its reading
        self.masks: dict[tuple[bytes, bytes], tuple[Floats, Ints]] = {}
        self.silent: dict[int, tuple[Floats, Ints]] = {}

    def operators(self) -> None:
        """Nodes of clusters and readings, and the edges between them."""
        for leader, (seconds, held) in zip(
            self.clusters.leaders, self.clusters.costs(), strict=True
        ):
            self._node(leader.name, seconds, held, {self.number[leader.name]})
        for op in self.model.graph.ops if self.model.measure.brings_once else ():
            for value in op.outputs:
                self._share(value)
        places = self.clusters.places
        for leader in self.clusters.leaders:
            node = places[leader.name].own_node
            for value in dict.fromkeys(leader.operands):
                source = self.clusters.written.get(value)
                if source is None or source.node is None:
                    continue
                if (value, leader.name) in self.reads:
                    self._read_shared(value, leader, self.reads[value, leader.name], node)
                else:
                    table = self.model.edge(value, source.codes, leader, _positions(leader, value))
                    self.edges.append(Edge(source.node, node, table.seconds, table.bytes))

    def parameters(self) -> None:
        """Nodes of parameters, and the edges to their readers."""
        graph, places = self.model.graph, self.clusters.places
        for leaf in self.leaves:
            mine = self.model.storable(leaf)
            self.storage.append(mine)
            table = self.model.parameter(leaf, mine)
            readers = graph.consumers[leaf.name]
            home = {self.number[op.name] for op in readers}
            node = self._node(leaf.name, table.seconds, table.bytes, home)
            for op in readers:
                read = self.model.edge(leaf.name, mine, op, _positions(op, leaf.name))
                self.edges.append(Edge(node, places[op.name].own_node, read.seconds, read.bytes))

    def _node(self, name: str, seconds: Floats, held: Ints, home: set[int]) -> int:
        self.nodes.append(Node(name, seconds, held))
        self.homes.append(frozenset(home))
        return len(self.nodes) - 1

    def _share(self, value: str) -> None:
        """Readings of `value`, for leaders that ask for the same layouts."""
        source = self.clusters.written[value]
        if source.node is None:
            return
        groups: dict[bytes, list[tuple[Op, Want]]] = {}
        for op in self.model.graph.consumers[value]:
            place, positions = self.clusters.places[op.name], _positions(op, value)
            if place.leads and place.node != source.node and len(positions) == 1:
                want = self.model.want(value, op, positions[0])
                pairs = np.unique(np.stack([want.layout, want.grad]), axis=1)
                groups.setdefault(pairs.tobytes(), []).append((op, want))
        for group in groups.values():
            if len(group) < 2:
                continue
            (_, want), readers = group[0], tuple(op for op, _ in group)
            layout, grad = np.unique(np.stack([want.layout, want.grad]), axis=1)
            different = Want(layout, grad)
            silent = self.silent.setdefault(
                len(layout), (np.zeros(len(layout)), np.zeros(len(layout), np.int64))
            )
            home = {min(self.number[op.name] for op in readers)}
            node = self._node(f"{value} as read by {readers[0].name}", *silent, home)
            self.readings.append(Reading(value, readers, different))
            table = self.model.shared_read(value, source.codes, different, readers)
            self.edges.append(Edge(source.node, node, table.seconds, table.bytes))
            for op in readers:
                self.reads[value, op.name] = node

    def _read_shared(self, value: str, op: Op, tail: int, head: int) -> None:
        """Reading free of charge what lies as the operator wants it, and nothing else."""
        first = len(self.clusters.leaders)
        offered = self.readings[tail - first].want
        wanted = self.model.want(value, op, _positions(op, value)[0])
        key = offered.layout.tobytes() + offered.grad.tobytes()
        other = wanted.layout.tobytes() + wanted.grad.tobytes()
        if (key, other) not in self.masks:
            same = offered.layout[:, None] == wanted.layout
            same &= offered.grad[:, None] == wanted.grad
            mask = np.where(same, 0.0, np.inf), np.zeros(same.shape, np.int64)
            self.masks[key, other] = mask
        self.edges.append(Edge(tail, head, *self.masks[key, other]))


def _positions(op: Op, value: str) -> list[int]:
    return [i for i, name in enumerate(op.operands) if name == value]
