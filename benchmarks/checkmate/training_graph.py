"""The training graph of a captured model as Checkmate has it: one node for each kernel that counts.

Operators are fused as autograd sees them: a result that autograd does not save, and that one node
reads, is computed inside of that node, and views belong to what they are views of. So a node has
one result that is worth keeping. Each node of the forward pass has one of the backward pass. Nodes
are in the order of the step, and every node reads only results of nodes before it.

Parameters, their gradients and the state of the optimizer are constant, as in the paper, and part
of no size here. A gradient to which several nodes add is made by the first of them and passed on by
the others, with their parts added; a residual sum passes its gradient on as it is.

Paper: Jain et al. 2020, "Checkmate" (arXiv 1910.02653), section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import numpy as np

from shardwright.ir.graph import Graph, Op

_PASSING = frozenset({"add", "clone"})  # their gradient is that of their operands, unless broadcast


@dataclass(frozen=True)
class TrainingGraph:
    """Nodes with a cost and one result each, in the order of the step.

    Attributes:
        names: of every node the operator whose result it keeps; backward nodes end in `'`.
        seconds: of one run of every node.
        bytes: of the result of every node, with all that autograd saves besides.
        workspace: bytes of what a node makes and drops while it runs.
        reads: of every node the nodes whose results it reads, all of them earlier.
        forward: how many nodes are of the forward pass; they come first.
        ops: of every forward node its operators, without views.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    workspace: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    forward: int
    ops: tuple[tuple[str, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of a step that computes every node once."""
        return sum(self.seconds)


def training_graph(graph: Graph, seconds: Mapping[str, tuple[float, float]]) -> TrainingGraph:
    """The training graph of `graph`; `seconds` has forward and backward ones of its operators."""
    return _Builder(graph, seconds).built()


@final
@dataclass
class _Builder:
    graph: Graph
    seconds: Mapping[str, tuple[float, float]]
    node: dict[str, int] = field(default_factory=dict)  # of every operator but views of leaves
    ops: list[list[Op]] = field(default_factory=list)  # of every node, without views

    def __post_init__(self) -> None:
        self.root: dict[str, str] = {}
        for op in self.graph.ops:
            for name in op.outputs:
                source = self.graph.tensor[name].alias_of
                self.root[name] = self.root.get(source, source) if source else name
        self.maker = {name: op for op in self.graph.ops for name in op.outputs}
        self.readers: dict[str, list[Op]] = {}  # of values that are no views
        for op in self.graph.ops:
            if not self._is_view(op):
                for name in {self.root.get(name, name): None for name in op.operands}:
                    self.readers.setdefault(name, []).append(op)
        self.saved = {self.root.get(name, name) for op in self.graph.ops for name in op.saves}

    def built(self) -> TrainingGraph:
        """The graph."""
        self._fuse()
        count = len(self.ops)
        reads = [self._operands(node) for node in range(count)]
        gradients = _Gradients(self, count)
        last = range(count - 1, -1, -1)  # the order of backward nodes
        place = {node: count + i for i, node in enumerate(last)}
        back = [gradients.of(node, place) for node in last]
        names = [ops[-1].name for ops in self.ops]
        forward, backward = np.zeros(count), np.zeros(count)
        for name, node in self.node.items():
            forward[node] += self.seconds[name][0]
            backward[node] += self.seconds[name][1]
        work = [self._workspace(node) for node in range(count)]
        return TrainingGraph(
            names=(*names, *(f"{names[node]}'" for node in last)),
            seconds=(*forward.tolist(), *backward[::-1].tolist()),
            bytes=(*map(self._bytes, range(count)), *(size for _, size in back)),
            workspace=(*work, *(work[node] for node in last)),
            reads=(*map(tuple, reads), *(before for before, _ in back)),
            forward=count,
            ops=tuple(tuple(op.name for op in ops) for ops in self.ops),
        )

    def _fuse(self) -> None:
        """Give every operator its node, number nodes by their last operators."""
        group: dict[str, str] = {}  # operator -> the last operator of its node
        for op in reversed(self.graph.ops):
            if not self._is_view(op):
                into = {
                    group[one.name] for name in op.outputs for one in self.readers.get(name, [])
                }
                alone = len(into) == 1 and not any(map(self._is_kept, op.outputs))
                group[op.name] = into.pop() if alone else op.name
        for op in self.graph.ops:
            if self._is_view(op) and (root := self.maker.get(self.root[op.outputs[0]])):
                group[op.name] = group[root.name]
        number = {
            name: i
            for i, name in enumerate(
                op.name for op in self.graph.ops if group.get(op.name) == op.name
            )
        }
        self.ops = [[] for _ in number]
        for op in self.graph.ops:
            if op.name in group:
                self.node[op.name] = number[group[op.name]]
                if not self._is_view(op):
                    self.ops[self.node[op.name]].append(op)

    def _is_view(self, op: Op) -> bool:
        return all(self.root[name] != name for name in op.outputs)

    def _is_kept(self, name: str) -> bool:
        """Whether a value is the result of a node: it has a gradient, and autograd saves it."""
        trained = self.graph.tensor[name].requires_grad
        return (trained and name in self.saved) or name in self.graph.outputs

    def values(self, node: int) -> list[str]:
        """The results of the last operator of a node."""
        return list(self.ops[node][-1].outputs)

    def operands(self, op: Op) -> Iterator[tuple[str, int]]:
        """Values that an operator reads and operators make, with their nodes."""
        for name in dict.fromkeys(self.root.get(name, name) for name in op.operands):
            if name in self.maker:
                yield name, self.node[self.maker[name].name]

    def _operands(self, node: int) -> list[int]:
        found = {at for op in self.ops[node] for _, at in self.operands(op)}
        return sorted(found - {node})

    def saves(self, node: int) -> set[int]:
        """The nodes whose results the backward pass of a node reads."""
        found = set()
        for op in self.ops[node]:
            names = [self.root.get(name, name) for name in op.saves]
            found |= {self.node[self.maker[name].name] for name in names if name in self.maker}
            if op.extra_saved:
                found.add(node)
        return found

    def size(self, name: str) -> int:
        return int(self.graph.tensor[name].bytes)

    def _bytes(self, node: int) -> int:
        """Bytes of the result, of what autograd saves inside of the node, and besides."""
        inside = {name for op in self.ops[node] for name in op.outputs}
        kept = {name for name in inside if name in self.saved} | set(self.values(node))
        return sum(map(self.size, kept)) + sum(op.extra_saved for op in self.ops[node])

    def _workspace(self, node: int) -> int:
        """The most bytes of values inside of a node that exist at once and are not its result."""
        ops, most = self.ops[node], 0
        own = set(self.values(node)) | self.saved
        last = {name: i for i, op in enumerate(ops) for name, _ in self.operands(op)}
        made: dict[str, int] = {}
        for i, op in enumerate(ops):
            made |= {name: self.size(name) for name in op.outputs if name not in own}
            most = max(most, sum(made.values()))
            made = {name: size for name, size in made.items() if last.get(name, -1) > i}
        return most


@final
class _Gradients:
    """The results of backward nodes: for every value, the node that has its gradient so far."""

    def __init__(self, builder: _Builder, count: int) -> None:
        self.builder = builder
        self.holder: dict[str, int | None] = {}  # value -> backward node; None: not yet
        self.last = count - 1

    def of(self, node: int, place: Mapping[int, int]) -> tuple[tuple[int, ...], int]:
        """What the backward node of a node reads, and the bytes of its result."""
        builder, (result, *_) = self.builder, self.builder.values(node)
        reads = builder.saves(node)
        if node != self.last:
            above = self.holder.get(result)
            if above is None:  # no gradient flows into it
                return (), 0
            reads.add(above)
        passed, size = self._passed(node), 0
        for op in builder.ops[node]:
            for name, at in builder.operands(op):
                if at == node or not builder.graph.tensor[name].requires_grad:
                    continue
                so_far = self.holder.get(name)
                if name in passed and so_far is None:
                    self.holder[name] = self.holder[result]
                    continue
                if so_far is not None and so_far != place[node]:
                    reads.add(so_far)
                if so_far != place[node]:
                    size += builder.size(name)
                self.holder[name] = place[node]
        return tuple(sorted(reads)), size

    def _passed(self, node: int) -> set[str]:
        """Values from other nodes whose gradient is that of the node's result."""
        builder, found = self.builder, set()
        names = builder.values(node)
        for name in names:
            op = builder.maker[name]
            if builder.node[op.name] != node:
                found.add(name)
            elif op.kind in _PASSING:
                shape = builder.graph.tensor[name].shape
                names += [
                    one
                    for one, _ in builder.operands(op)
                    if builder.graph.tensor[one].shape == shape
                ]
        return found
