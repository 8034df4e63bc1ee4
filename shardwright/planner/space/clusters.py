"""Groups operators into clusters, each decided by the choice of one operator, its leader.

An operator follows a cluster if all its activations come from that cluster and, for every choice of
the cluster, one of its tilings reads them without redistribution. Followers are views, pointwise
operators after an operator without partial sums, the two halves of a rotary embedding. Each other
operator leads a cluster of its own. In this space a value is never redistributed before a follower,
but it may be after it. A cluster does not extend over several segments that may be recomputed.

Operators that depend only on constants (positions, causal masks, rotary angles) are computed whole
on every device: they are small, and a device reads a slice of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.planner.tables.layout_codes import duals
from shardwright.planner.tables.model import CostModel
from shardwright.rules.operators.pointwise import fill_shape
from shardwright.rules.operators.table import BUILDERS
from shardwright.solve.elimination.problem import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class OpNode:
    """The node that decides an operator: its option under choice k of `node` is `options[k]`.

    Without a node its option is always `options[0]`.
    """

    node: int | None
    options: Ints
    leads: bool

    @property
    def own_node(self) -> int:
        """The node of an operator that is not fixed."""
        assert self.node is not None, "computed whole everywhere"
        return self.node


@dataclass(frozen=True, slots=True, eq=False)
class LayoutChoices:
    """The layouts of a value under the choices of its node; replicated if it has no node."""

    node: int | None
    codes: Ints


def constant_values(graph: Graph) -> set[str]:
    """Names of the values that depend only on constants, which every device computes whole.

    Left out are values with equal elements, as of `empty` and `zeros`, that are only read beside
    values of the batch: any tile of them can be made alone, and the whole may take much memory.
    """
    found = {leaf.name for leaf in graph.leaves_of(LeafKind.CONSTANT, LeafKind.BUFFER)}
    for op in graph.ops:
        if all(name in found for name in op.operands):
            found.update(op.outputs)
    for op in graph.ops:
        if (
            op.operands
            or BUILDERS.get(op.kind) is not fill_shape
            or not graph.tensor[op.outputs[0]].shape
        ):
            continue
        readers = graph.consumers[op.outputs[0]]
        if readers and not any(found.issuperset(one.outputs) for one in readers):
            found.difference_update(op.outputs)
    return found


_WHOLE = np.zeros(1, np.int64)
_WHOLE.flags.writeable = False


@final
class Clusters:
    """Assigns every operator to a node, and every value to the node that produces it."""

    def __init__(
        self,
        model: CostModel,
        segments: Mapping[str, int],
        leaders: Collection[str] | None = None,
        forced_leaders: Collection[str] = (),
    ) -> None:
        """`segments` maps every operator of a checkpoint segment to its segment.

        Where `leaders` are given, they lead and all others follow. Otherwise the `forced_leaders`
        lead, and every operator that can follow does.
        """
        self.model = model
        self.segments = segments
        self._leads = leaders
        self._forced_leaders = forced_leaders
        self.leaders: list[Op] = []
        self.op_nodes: dict[str, OpNode] = {}
        self.written: dict[str, LayoutChoices] = {}
        self._sums: dict[object, tuple[Floats, Ints]] = {}
        self._alive: list[_Sum] = []  # objects whose ids are in the keys of `_sums`
        self._follows: dict[object, Ints | None] = {}
        self._arrays: dict[object, Ints] = {}
        self._returned = {*model.graph.outputs, *(v for _, v in model.graph.updates)}
        graph = model.graph
        self._constant = constant_values(graph)
        for leaf in graph.leaves_of(LeafKind.CONSTANT, LeafKind.BUFFER, LeafKind.INPUT):
            self.written[leaf.name] = LayoutChoices(None, _WHOLE)
        for op in graph.ops:
            self._add(op)

    def costs(
        self, recomputed: Mapping[str, frozenset[str]], once: Collection[str] = ()
    ) -> Iterator[tuple[Floats, Ints]]:
        """Seconds and bytes of every cluster, per choice; equal clusters share arrays.

        `recomputed` maps recomputed operators to all operators of their segment. The second run of
        those in `once` is left out.
        """
        fixed, parts = _Sum(), [_Sum() for _ in self.leaders]
        for op in self.model.graph.ops:
            op_node = self.op_nodes[op.name]
            part = fixed if op_node.node is None else parts[op_node.node]
            together = recomputed.get(op.name, frozenset[str]())
            table = self.model.operator(op, together, op.name in once)
            part.add(table.seconds, table.bytes, op_node.options)
            self._pay(op, op_node, part, again=bool(together))
        if fixed.terms and parts:  # the first cluster pays for operators without a node
            parts[0].add_fixed(fixed)
        for part in parts:
            key = part.key()
            if key not in self._sums:
                self._sums[key] = part.total()
                self._alive.append(part)
            yield self._sums[key]

    def _add(self, op: Op) -> None:
        """Assign an operator to the cluster that it follows, or to one of its own."""
        model = self.model
        options = model.options(op)
        if all(name in self._constant for name in op.operands):
            self.op_nodes[op.name] = OpNode(None, _WHOLE, leads=False)
            for name in op.outputs:
                self.written[name] = LayoutChoices(None, _WHOLE)
            return
        follows = None if self._must_lead(op) else self._follow(op)
        if follows is None:
            assert self._leads is None or op.name in self._leads, f"{op.name} cannot follow"
            node = len(self.leaders)
            self.leaders.append(op)
            op_node = OpNode(node, self._array(range(len(options))), leads=True)
        else:
            op_node = OpNode(follows[0], follows[1], leads=False)
        self.op_nodes[op.name] = op_node
        for i, name in enumerate(op.outputs):
            key = (options.results[i].tobytes(), id(op_node.options))
            if key not in self._arrays:
                self._arrays[key] = options.results[i][op_node.options]
            self.written[name] = LayoutChoices(op_node.node, self._arrays[key])

    def _must_lead(self, op: Op) -> bool:
        return op.name in (self._forced_leaders if self._leads is None else self._leads)

    def _array(self, numbers: range) -> Ints:
        if numbers not in self._arrays:
            self._arrays[numbers] = np.array(numbers)
        return self._arrays[numbers]

    def _follow(self, op: Op) -> tuple[int, Ints] | None:
        """The cluster that `op` can follow, and its option under each choice of that cluster."""
        sources = [self.written.get(name) for name in op.operands]
        if any(source is None for source in sources):
            return None  # reads a parameter
        known = [source for source in sources if source is not None]
        nodes = {source.node for source in known if source.node is not None}
        if len(nodes) != 1:
            return None
        node = nodes.pop()
        if self.segments.get(self.leaders[node].name) != self.segments.get(op.name):
            return None
        table = self.model.operator(op)
        gradients = tuple(self.model.has_gradient(name, op) for name in op.operands)
        key = (
            id(self.model.options(op)),
            id(table),
            tuple(None if s.node is None else s.codes.tobytes() for s in known),
            gradients,
        )
        if key not in self._follows:
            self._follows[key] = self._aligned(op, known, gradients, table.seconds)
        found = self._follows[key]
        return None if found is None else (node, found)

    def _aligned(
        self, op: Op, sources: list[LayoutChoices], gradients: tuple[bool, ...], seconds: Floats
    ) -> Ints | None:
        """The fastest option without redistribution, per choice; None if a choice has none."""
        options, axes = self.model.options(op), len(self.model.mesh.axes)
        good = np.ones((1, len(options)), bool)
        for i, source in enumerate(sources):
            if source.node is None:
                continue
            good = good & (source.codes[:, None] == options.operands[i])
            if gradients[i]:
                good = good & (duals(source.codes, axes)[:, None] == options.grads[i])
        if not good.any(axis=1).all():
            return None
        return np.asarray(np.where(good, seconds, np.inf).argmin(axis=1))

    def _pay(self, op: Op, op_node: OpNode, part: _Sum, *, again: bool) -> None:
        """Add to `part` the cost of slicing an operator's operands, and of copies it keeps."""
        model = self.model
        for name in dict.fromkeys(op.operands):
            source = self.written.get(name)
            if source is None or (op_node.leads and source.node is not None):
                continue
            if source.node is not None:  # it moves nothing, but its memory may be kept
                memory = model.kept_in_place(name, op, source.codes)
                if memory is not None and not again:
                    part.add(np.zeros(len(memory)), memory, slice(None), of=memory.tobytes())
                continue
            positions = [i for i, operand in enumerate(op.operands) if operand == name]
            read = model.edge(name, source.codes, op, positions, recomputed=again)
            part.add(read.seconds[0], read.bytes[0], op_node.options, of=read.seconds)
        for i, name in enumerate(op.outputs):
            if name in self._returned:
                codes = model.options(op).results[i]
                seconds = model.returning(name, codes)
                of = codes.tobytes() + seconds.tobytes()
                part.add(seconds, np.zeros_like(codes), op_node.options, of=of)


@dataclass
class _Sum:
    """The cost of a cluster as a sum of shared tables, so that equal sums are recognised."""

    terms: list[tuple[object, int | None, Floats, Ints]] = field(default_factory=list)
    alive: list[object] = field(default_factory=list)  # objects whose ids are in keys

    def add(self, seconds: Floats, memory: Ints, at: Ints | slice, of: object = None) -> None:
        """Add entries `at` of a table, identified by `of`, or by its array of seconds."""
        key = of if isinstance(of, bytes) else id(seconds if of is None else of)
        where = None if isinstance(at, slice) else id(at)
        self.alive += [of, seconds, at]
        self.terms.append((key, where, seconds[at], memory[at]))

    def add_fixed(self, other: _Sum) -> None:
        """Add the cost of `other`, which does not depend on the choice."""
        seconds = np.array([sum(float(term[2][0]) for term in other.terms)])
        memory = np.array([sum(int(term[3][0]) for term in other.terms)])
        self.alive.append(other)
        self.terms.append((id(other), 0, seconds, memory))

    def key(self) -> object:
        return tuple((table, options) for table, options, _, _ in self.terms)

    def total(self) -> tuple[Floats, Ints]:
        _, _, seconds, memory = self.terms[0]
        for _, _, more, others in self.terms[1:]:
            seconds, memory = seconds + more, memory + others
        return seconds, memory
