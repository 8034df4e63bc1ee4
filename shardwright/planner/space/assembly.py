"""Assembles the nodes and edges of a search space from a graph's operators and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from shardwright.ir.graph import LeafKind, Op
from shardwright.planner.communication.resharding import Table, Want
from shardwright.planner.space.clusters import Clusters
from shardwright.planner.space.host_inputs import HostInput, HostInputs, InputRead
from shardwright.planner.space.kept_operators import KeptOperator, KeptOperators
from shardwright.planner.tables.layout_codes import WHOLE
from shardwright.planner.tables.model import CostModel
from shardwright.solve.elimination.problem import Bools, Edge, Floats, Ints, Node, Problem

_Recomputed = Mapping[str, frozenset[str]]  # operator -> all that it is recomputed with


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Readers of one value that read it in the same layout; choice k is entry k of `want`."""

    value: str
    readers: tuple[Op, ...]
    want: Want


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The ways to store a parameter: choice k has layout `codes[k]`, (K,).

    Copies in other layouts are kept for the backward pass, or, where `regathered[k]`, (K,), freed
    after the forward pass and made again.
    """

    codes: Ints
    regathered: Bools

    def find(self, code: int, *, regathered: bool) -> int:
        """The choice with this layout; with `regathered`, the regathering one if there is one."""
        here = np.flatnonzero(self.codes == code)
        return int(here[-1] if regathered else here[0])


@dataclass(frozen=True)
class Skeleton:
    """The structure of a space, which does not depend on the allowed choices.

    Attributes:
        leaders: the operators that lead a cluster; None derives them from the model.
        forced_leaders: operators that must lead if `leaders` is None.
        shared: for each value, the readers of each reading; None derives them from the model.
        kept: operators inside of recomputed segments that may run once and keep their results; None
            for those that are worth it (`kept_operators.py`).
        chains: whether chains of elementwise operators may be kept as products are.
        parts: whether parts of a layer, such as attention and MLP, are segments of their own.
        host_bytes: bytes of the memory of the host that the input of a recomputed segment may take;
            None if inputs stay on the device.
        last_moves: whether the input of the last segment may wait there, too.
        ends_again: whether an operator at the end of a segment is recomputed if it saves values
            that the segment produces.
        keeps_copies: whether recomputed operators may read kept copies of sharded parameters.
    """

    leaders: frozenset[str] | None = None
    forced_leaders: frozenset[str] = frozenset()
    shared: Mapping[str, tuple[tuple[str, ...], ...]] | None = None
    kept: frozenset[str] | None = frozenset()
    chains: bool = False
    parts: bool = False
    host_bytes: int | None = None
    last_moves: bool = False
    ends_again: bool = False
    keeps_copies: bool = True


FREE = Skeleton()
# With copies that recomputed layers keep, frontiers reach so far that they are sparse where plans
# fit; strategies have them.
SEARCHED = Skeleton(kept=None, keeps_copies=False)
SEARCHED_EXACTLY = Skeleton(kept=None, chains=True)


@final
class Assembly:
    """The parts of a space: nodes are clusters, then readings, then parameters.

    `segments` are ranges of operator indices that may be recomputed together.
    """

    def __init__(
        self, model: CostModel, segments: Sequence[range], skeleton: Skeleton = FREE
    ) -> None:
        self.model = model
        self._given = skeleton
        self.leaves = model.graph.leaves_of(LeafKind.PARAMETER)
        self.number = {op.name: i for i, op in enumerate(model.graph.ops)}
        self._segment = {
            model.graph.ops[i].name: number for number, span in enumerate(segments) for i in span
        }
        self.clusters = Clusters(model, self._segment, skeleton.leaders, skeleton.forced_leaders)
        self.segment_of = self._movable()  # node -> its segment
        self.readings: list[Reading] = []
        self._reads: dict[tuple[str, str], int] = {}  # (value, reader) -> node of its reading
        self._wants: dict[tuple[bytes, bytes], tuple[Ints, bytes]] = {}
        for op in model.graph.ops if model.measure.redistributes_once else ():
            for value in op.outputs:
                self._share(value)
        self.storage = tuple(self._storage())
        for i, leaf in enumerate(self.leaves, self.first_parameter):
            readers = model.graph.consumers[leaf.name]
            at = {self.segment_of.get(self.clusters.op_nodes[op.name].own_node) for op in readers}
            (segment,) = at if len(at) == 1 else (None,)
            if segment is not None:  # then only this segment depends on its storage
                self.segment_of[i] = segment
        self.host_inputs: tuple[HostInput, ...] = ()  # of the last `problem` that was made
        self._tables: dict[object, tuple[Floats, Ints]] = {}
        self._alive: list[object] = []  # objects whose ids are in the keys of `_tables`

    @property
    def first_parameter(self) -> int:
        return len(self.clusters.leaders) + len(self.readings)

    def skeleton(self) -> Skeleton:
        """The structure of this space."""
        shared: dict[str, tuple[tuple[str, ...], ...]] = {}
        for reading in self.readings:
            group = tuple(op.name for op in reading.readers)
            shared[reading.value] = (*shared.get(reading.value, ()), group)
        return Skeleton(frozenset(op.name for op in self.clusters.leaders), shared=shared)

    def owners(self) -> list[frozenset[int]]:
        """The operators to which each node belongs."""
        consumers = self.model.graph.consumers
        found = [frozenset({self.number[op.name]}) for op in self.clusters.leaders]
        for reading in self.readings:
            found.append(frozenset({min(self.number[op.name] for op in reading.readers)}))
        for leaf in self.leaves:
            found.append(frozenset(self.number[op.name] for op in consumers[leaf.name]))
        return found

    def recomputed(self) -> _Recomputed:
        """Every operator that may be recomputed, with those that are recomputed with it."""
        groups: dict[int, set[str]] = {}
        for op in self.model.graph.ops:
            node = self.clusters.op_nodes[op.name].node
            if node is not None and node in self.segment_of:
                groups.setdefault(self.segment_of[node], set()).add(op.name)
        together = [frozenset(group) for group in groups.values()]
        return {name: group for group in together for name in group}

    def kept_operators(self, recomputed: _Recomputed) -> tuple[KeptOperator, ...]:
        """The operators that may be kept inside of recomputed segments."""
        operators = KeptOperators(
            self.clusters,
            segment=self._segment,
            recomputed=recomputed,
            named=self._given.kept,
            chains=self._given.chains,
        )
        return tuple(operators.found())

    def problem(self, recomputed: _Recomputed, once: Collection[str] = ()) -> Problem:
        """Nodes and edges with their costs, where some operators are recomputed.

        The second run of those in `once` is left out. Sets `host_inputs` to those of this problem.
        """
        nodes = [
            Node(op.name, *costs)
            for op, costs in zip(
                self.clusters.leaders, self.clusters.costs(recomputed, once), strict=True
            )
        ]
        for reading in self.readings:
            size = len(reading.want.layout)
            zeros = self._known(("silent", size), partial(_zeros, size))
            nodes.append(Node(f"{reading.value} as read by {reading.readers[0].name}", *zeros))
        for leaf, stored in zip(self.leaves, self.storage, strict=True):
            table = self.model.parameter(leaf, stored.codes)
            nodes.append(Node(leaf.name, table.seconds, table.bytes))
        edges = [*self._activations(recomputed), *self._parameters(recomputed)]
        return Problem(tuple(nodes), tuple(edges))

    def _movable(self) -> dict[int, int]:
        """For each recomputable cluster its segment; clusters at the end of a segment have none.

        A value that only later segments read is computed once: no recomputed operator needs it.
        """
        op_nodes, consumers = self.clusters.op_nodes, self.model.graph.consumers
        staying: set[int] = set()
        members: dict[int, list[Op]] = {}
        for op in self.model.graph.ops:
            node = op_nodes[op.name].node
            if node is not None:
                members.setdefault(node, []).append(op)
        found: dict[int, int] = {}
        for node in range(len(self.clusters.leaders) - 1, -1, -1):
            segment = self._segment.get(self.clusters.leaders[node].name)
            if segment is None:
                continue
            readers = [op for made in members[node] for v in made.outputs for op in consumers[v]]
            inside = {
                op_nodes[op.name].node for op in readers if self._segment.get(op.name) == segment
            } - {node, None}
            crossing = any(self._segment.get(op.name) != segment for op in readers)
            wanted = self._given.ends_again and self._saves_inside(members[node], segment)
            if crossing and inside <= staying and not wanted:
                staying.add(node)
            else:
                found[node] = segment
        return found

    def _saves_inside(self, ops: Sequence[Op], segment: int) -> bool:
        """Whether operators save values that a segment produces, or tensors beside operands."""
        made = self.model.graph.producer
        saved = [name for op in ops for name in op.saves if name in made]
        own = {name for op in ops for name in op.outputs}
        return any(op.extra_saved for op in ops) or any(
            name not in own and self._segment.get(made[name].name) == segment for name in saved
        )

    def _share(self, value: str) -> None:
        """Add readings of `value` for leaders that read the same layouts."""
        source = self.clusters.written[value]
        if source.node is None:
            return
        for readers in self._sharing(value, source.node):
            if len(readers) < 2:
                continue
            given = self._given.shared is not None  # if not, all read the same layouts
            asked = readers if given else readers[:1]
            layout, grad = _pairs(self._want(value, asked), self._wants)[0]
            node = len(self.clusters.leaders) + len(self.readings)
            self.readings.append(Reading(value, tuple(readers), Want(layout, grad)))
            segment = self.segment_of.get(self.clusters.op_nodes[readers[0].name].own_node)
            if segment is not None:
                self.segment_of[node] = segment
            for op in readers:
                self._reads[value, op.name] = node

    def _want(self, value: str, readers: Sequence[Op]) -> Want:
        """All layouts in which any of `readers` reads `value`."""
        wants = [self.model.want(value, op, _positions(op, value)[0]) for op in readers]
        return Want(*(np.concatenate(parts) for parts in zip(*wants, strict=True)))

    def _sharing(self, value: str, source: int) -> Iterable[Sequence[Op]]:
        """Groups of readers of `value`, made by the cluster `source`, with the same layouts."""
        readers = self.model.graph.consumers[value]
        if self._given.shared is not None:
            named = self._given.shared.get(value, ())
            return [[op for op in readers if op.name in group] for group in named]
        groups: dict[tuple[bytes, int | None], list[Op]] = {}
        for op in readers:
            op_node, positions = self.clusters.op_nodes[op.name], _positions(op, value)
            if op_node.leads and op_node.node != source and len(positions) == 1:
                want = self.model.want(value, op, positions[0])
                key = _pairs(want, self._wants)[1], self.segment_of.get(op_node.own_node)
                groups.setdefault(key, []).append(op)
        return groups.values()

    def _activations(self, recomputed: _Recomputed) -> list[Edge]:
        """The edges from clusters that produce values to those that read them."""
        written, op_nodes = self.clusters.written, self.clusters.op_nodes
        edges = []
        kept: set[tuple[str, int]] = set()  # (value, segment) that an edge pays for
        hosts = HostInputs(
            self.clusters,
            segment=self._segment,
            segment_of=self.segment_of,
            recomputed=recomputed,
            share=self._given.host_bytes,
            last_moves=self._given.last_moves,
        )
        for number, reading in enumerate(self.readings, len(self.clusters.leaders)):
            source = written[reading.value]
            again = reading.readers[0].name in recomputed
            table = self.model.shared_read(
                reading.value, source.codes, reading.want, reading.readers, again
            )
            if again:
                reads = InputRead(reading.value, reading.readers[0], number)
                table = self._kept_for(reads, recomputed, table, kept, hosts)
            assert source.node is not None
            edges.append(Edge(source.node, number, table.seconds, table.bytes))
        for leader in self.clusters.leaders:
            node = op_nodes[leader.name].own_node
            for value in dict.fromkeys(leader.operands):
                made = written.get(value)
                if made is None or made.node is None:
                    continue
                if (value, leader.name) in self._reads:
                    edges.append(self._read_shared(value, leader, node))
                    continue
                again = leader.name in recomputed
                positions = _positions(leader, value)
                table = self.model.edge(value, made.codes, leader, positions, recomputed=again)
                if again:
                    reads = InputRead(value, leader, node)
                    table = self._kept_for(reads, recomputed, table, kept, hosts)
                edges.append(Edge(made.node, node, table.seconds, table.bytes))
        self.host_inputs = tuple(hosts.found)
        return edges

    def _kept_for(
        self,
        reads: InputRead,
        recomputed: _Recomputed,
        table: Table,
        kept: set[tuple[str, int]],
        hosts: HostInputs,
    ) -> Table:
        """`table` with the bytes that keep a value for a recomputed segment that reads it.

        A value that may wait on the host is none of `table`: `hosts` has its costs.
        """
        value, reader, _ = reads
        source = self.clusters.written[value]
        segment = self._segment[reader.name]
        own = source.node is not None and self.segment_of.get(source.node) == segment
        if own or (value, segment) in kept:
            return table
        kept.add((value, segment))
        memory = self.model.kept_for(value, recomputed[reader.name], source.codes)
        if memory is None or hosts.offers(reads, memory):
            return table
        key = "kept", id(table.seconds), id(table.bytes), memory.tobytes()
        self._alive.append(table)
        return Table(*self._known(key, lambda: (table.seconds, table.bytes + memory[:, None])))

    def _parameters(self, recomputed: _Recomputed) -> list[Edge]:
        """The edges from parameters to their readers."""
        edges = []
        for i, (leaf, stored) in enumerate(zip(self.leaves, self.storage, strict=True)):
            for op in self.model.graph.consumers[leaf.name]:
                table = self.model.edge(
                    leaf.name,
                    stored.codes,
                    op,
                    _positions(op, leaf.name),
                    stored.regathered,
                    op.name in recomputed,
                )
                if op.name in recomputed and not self._given.keeps_copies:
                    table = self._without_copies(table, stored)
                reader = self.clusters.op_nodes[op.name].own_node
                edges.append(Edge(self.first_parameter + i, reader, table.seconds, table.bytes))
        return edges

    def _without_copies(self, table: Table, stored: Storage) -> Table:
        """`table`, infeasible where a parameter is sharded and not gathered again."""
        barred = (stored.codes != WHOLE) & ~stored.regathered
        key = "no copies", id(table.seconds), id(table.bytes), barred.tobytes()
        self._alive.append(table)
        kept = np.where(barred[:, None], np.inf, table.seconds), table.bytes
        return Table(*self._known(key, lambda: kept))

    def _read_shared(self, value: str, op: Op, head: int) -> Edge:
        """The edge of a reader of a reading: free in its own layout, infeasible in others."""
        tail = self._reads[value, op.name]
        offered = self.readings[tail - len(self.clusters.leaders)].want
        wanted = self.model.want(value, op, _positions(op, value)[0])

        def mask() -> tuple[Floats, Ints]:
            same = offered.layout[:, None] == wanted.layout
            same &= offered.grad[:, None] == wanted.grad
            return np.where(same, 0.0, np.inf), np.zeros(same.shape, np.int64)

        key = tuple(part.tobytes() for part in (*offered, *wanted))
        return Edge(tail, head, *self._known(key, mask))

    def _storage(self) -> list[Storage]:
        """The ways to store each parameter; parameters with equal ways share them."""
        known: dict[object, Storage] = {}
        found = []
        for leaf in self.leaves:
            codes, name = self.model.storable(leaf), leaf.name
            twice = any(
                self.model.reads_copy_twice(name, op, op.name in self._segment)
                for op in self.model.graph.consumers[name]
            )
            key = id(codes), twice
            if key not in known:
                known[key] = _stored(codes, twice)
            found.append(known[key])
        return found

    def _known(self, key: object, make: Callable[[], tuple[Floats, Ints]]) -> tuple[Floats, Ints]:
        """The same arrays for equal keys, so that equal tables are recognised."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]


def _stored(codes: Ints, twice: bool) -> Storage:
    """Every layout; sharded ones also regathered, if copies of the parameter are read twice."""
    again = codes[codes != WHOLE] if twice else codes[:0]
    regathered = np.repeat([False, True], [len(codes), len(again)])
    return Storage(np.concatenate((codes, again)), regathered)


def _pairs(want: Want, known: dict[tuple[bytes, bytes], tuple[Ints, bytes]]) -> tuple[Ints, bytes]:
    """The unique pairs of layouts of a value and its gradient, (2, K), also as bytes."""
    key = want.layout.tobytes(), want.grad.tobytes()
    if key not in known:
        found = np.unique(np.stack([want.layout, want.grad]), axis=1)
        known[key] = found, found.tobytes()
    return known[key]


def _zeros(size: int) -> tuple[Floats, Ints]:
    return np.zeros(size), np.zeros(size, np.int64)


def _positions(op: Op, value: str) -> list[int]:
    return [i for i, name in enumerate(op.operands) if name == value]
