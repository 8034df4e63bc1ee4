"""Operators that may run once inside of a recomputed segment, and the cost of keeping each.

A kept operator saves its second forward run. In exchange its results stay in memory, if what runs
again reads them or if the backward pass needs them, and so does what it saves besides, such as a
log-sum-exp. What it saves of the segment's other values exists again once the segment has run
again. So its cost depends on its own tiling alone, and is added to its node.

The search may keep products, convolutions, attention and experts, and an exact search *chains* too,
which save little time and cost the host regions without a price. A chain is an operator whose
result autograd saves, with those before it whose results autograd does not save and only the chain
reads, such as the polynomial of an activation function. It is kept as a whole, for the bytes of one
result. The time of all other operators is about that of moving their results, so keeping one buys
little time for its memory. A result that is summed over devices is kept only where what reads
it does not run again, because elsewhere the tables would count its sum twice.

Paper: Korthikanti et al. 2022 (arXiv 2205.05198), selective recomputation of attention.
Deviation: the search decides for each operator of each segment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from shardwright.ir.graph import Op
from shardwright.planner.space.clusters import Clusters
from shardwright.planner.tables.layout_codes import SUMS, digits
from shardwright.planner.tables.memory import kept_bytes
from shardwright.simulate.costs.workload import OperatorClass
from shardwright.solve.elimination.problem import Bools, Floats, Ints
from shardwright.solve.elimination.recompute_choice import KeepChoice

_PRODUCTS = frozenset(
    {
        OperatorClass.MATMUL,
        OperatorClass.CONVOLUTION,
        OperatorClass.ATTENTION,
        OperatorClass.EXPERTS,
        OperatorClass.CHUNKED_MLP,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class KeptOperator:
    """An operator of a recomputed segment that may run once.

    Attributes:
        op: the operator.
        ops: its name, those of its chain, those of views of their results, and of copies before a
            residual sum, all of which are kept with it.
        bytes: what is kept in addition, for each option of the operator.
        choice: its cost, for each choice of its node.
    """

    op: Op
    ops: frozenset[str]
    bytes: Ints
    choice: KeepChoice


@final
class KeptOperators:
    """Finds the operators that may be kept, and prices them.

    Args:
        clusters: the nodes of operators.
        segment: the segment of each operator that is in one.
        recomputed: every operator that may be recomputed, with those that are recomputed with it.
        named: the operators that may be kept; None for those that are worth it.
        chains: whether chains may be, too.
    """

    def __init__(
        self,
        clusters: Clusters,
        segment: Mapping[str, int],
        recomputed: Mapping[str, frozenset[str]],
        named: Collection[str] | None,
        *,
        chains: bool = True,
    ) -> None:
        self._clusters, self._model = clusters, clusters.model
        self._segment, self._recomputed, self._named = segment, recomputed, named
        graph = self._model.graph
        self._returned = {*graph.outputs, *(value for _, value in graph.updates)}
        self._root: dict[str, str] = {}  # value -> the value of which it is a view
        for op in graph.ops:
            for name in op.outputs:
                source = graph.tensor[name].alias_of
                self._root[name] = self._root.get(source, source) if source else name
        self._saved = {self._root.get(name, name) for op in graph.ops for name in op.saves}
        self._chains: dict[str, list[Op]] = {}  # last operator -> those before it
        self._inside = self._find_chains() if chains else set()
        self._place = {op.name: i for i, op in enumerate(graph.ops)}
        self._tables: dict[object, tuple[Floats, Ints]] = {}

    def found(self) -> Iterator[KeptOperator]:
        """The operators, in the order of the graph."""
        taken: set[str] = set()  # views that are kept with an operator
        for op in self._model.graph.ops:
            if op.name in taken or op.name in self._inside or not self._is_offered(op):
                continue
            chain = [op, *self._chains.get(op.name, ())]
            ops = frozenset[str]().union(*map(self._with_views, chain))
            if self._named is None and not self._is_worth_it(op, ops):
                continue
            taken |= ops
            kept = self._bytes(op, ops)
            yield KeptOperator(op, ops, kept, self._choice(op, ops, kept))

    def _is_offered(self, op: Op) -> bool:
        """Whether an operator may be recomputed, and kept."""
        return op.name in self._recomputed and (self._named is None or op.name in self._named)

    def _find_chains(self) -> set[str]:
        """Find all chains; return the names of their operators but the last ones."""
        end: dict[str, Op] = {}
        for op in reversed(self._model.graph.ops):
            if not self._is_offered(op) or not self._is_passing(op):
                continue
            ends = {(last := end.get(one.name, one)).name: last for one in self._readers(op)}
            if len(ends) == 1:
                (last,) = ends.values()
                if self._is_offered(last) and self._are_one(op, last):
                    end[op.name] = last
                    self._chains.setdefault(last.name, []).append(op)
        return set(end)

    def _is_passing(self, op: Op) -> bool:
        """Whether autograd keeps nothing of an operator, and the step returns nothing of it."""
        made = [name for name in op.outputs if self._root[name] == name]
        kept = (self._saved | self._returned).intersection(op.outputs)
        return bool(made) and not kept and not op.extra_saved

    def _are_one(self, op: Op, other: Op) -> bool:
        """Whether one node decides two operators, neither of them a product."""
        nodes = self._clusters.op_nodes
        products = self._is_product(op) or self._is_product(other)
        return not products and nodes[op.name].node == nodes[other.name].node

    def _readers(self, op: Op) -> list[Op]:
        """The operators that read results of an operator or views of these, but for the views."""
        graph, found, names = self._model.graph, list[Op](), list(op.outputs)
        for name in names:
            for reader in graph.consumers[name]:
                views = [out for out in reader.outputs if self._root[out] != out]
                names += views
                if not views:
                    found.append(reader)
        return found

    def _is_product(self, op: Op) -> bool:
        return self._model.meshless.workload(op).kind in _PRODUCTS

    def _with_views(self, op: Op) -> frozenset[str]:
        """An operator, and the views of its results and copies at the end decided with it."""
        graph, nodes = self._model.graph, self._clusters.op_nodes
        node, found = nodes[op.name].node, [op]
        for one in found:
            for name in one.outputs:
                for reader in graph.consumers[name]:
                    views = all(self._root[out] in op.outputs for out in reader.outputs)
                    named = self._named is None or reader.name in self._named
                    one_node = nodes[reader.name].node == node
                    if (views or self._is_end(reader)) and named and one_node:
                        found.append(reader)
        return frozenset(one.name for one in found)

    def _is_end(self, op: Op) -> bool:
        """Whether an operator runs again, and no one needs what it makes then."""
        readers = [one for name in op.outputs for one in self._model.graph.consumers[name]]
        needed = any(one.name in self._recomputed for one in readers)
        return op.name in self._recomputed and not needed and self._is_passing(op)

    def _is_worth_it(self, op: Op, ops: frozenset[str]) -> bool:
        """Whether the search may keep an operator: what it computes, and who reads its results."""
        chained = op.name in self._chains and not self._saved.isdisjoint(op.outputs)
        if not (chained or self._is_product(op)):
            return False
        segment = self._segment[op.name]
        values = self._values(ops)
        return self._returned.isdisjoint(values) and all(
            self._segment.get(reader.name) == segment
            for name in values
            for reader in self._model.graph.consumers[name]
        )

    def _values(self, ops: Collection[str]) -> list[str]:
        """The results of some operators."""
        graph = self._model.graph
        return [name for one in ops for name in graph.op[one].outputs]

    def _read_again(self, ops: frozenset[str]) -> set[str]:
        """The results of some operators that other operators read when they run again."""
        graph = self._model.graph
        return {
            name
            for name in self._values(ops)
            if any(r.name in self._recomputed and r.name not in ops for r in graph.consumers[name])
        }

    def _bytes(self, op: Op, ops: frozenset[str]) -> Ints:
        """Bytes that are kept in addition if an operator runs once, for each of its options."""
        graph, model = self._model.graph, self._model
        together = self._recomputed[op.name]
        needed = {self._root[name] for name in self._read_again(ops)}
        for name in together:
            needed.update(self._root.get(value, value) for value in graph.op[name].saves)
        more = tuple(
            self._root[name] in needed and not model.stays(self._root[name], together)
            for name in op.outputs
        )
        work, sizes = model.meshless.workload(op), model.options(op).sizes
        return kept_bytes(work, more, op.extra_saved, sizes, op.extra_rows)

    def _choice(self, op: Op, ops: frozenset[str], kept: Ints) -> KeepChoice:
        """The cost of running an operator again, and of keeping it, by the choice of its node."""
        op_node = self._clusters.op_nodes[op.name]
        barred = np.zeros(len(op_node.options), bool)
        if self._named is None:
            barred = self._sums(ops)
        runs = [self._runs(name) for name in sorted(ops, key=self._place.__getitem__)]
        tables = tuple(id(part) for run in runs for part in run)
        key = tables, id(op_node.options), kept.tobytes(), barred.tobytes()
        if key not in self._tables:
            again = np.zeros(len(op_node.options))
            for twice, once, options in runs:
                again += (twice - once)[options]
            time = np.stack([again, np.where(barred, np.inf, 0.0)], axis=1)
            memory = np.stack([np.zeros_like(kept), kept], axis=1)[op_node.options]
            self._tables[key] = time, memory
        return KeepChoice(op.name, op_node.own_node, *self._tables[key])

    def _runs(self, name: str) -> tuple[Floats, Floats, Ints]:
        """Seconds of an operator that runs again, and of one that does not, by its options; and its
        option for each choice of its node.
        """
        model, together = self._model, self._recomputed[name]
        op, options = model.graph.op[name], self._clusters.op_nodes[name].options
        twice, once = (model.operator(op, together, once=once) for once in (False, True))
        return twice.seconds, once.seconds, options

    def _sums(self, ops: frozenset[str]) -> Bools:
        """For each choice of their node, whether operators that run again read partial sums."""
        axes = len(self._model.mesh.axes)
        (node,) = {self._clusters.op_nodes[name].node for name in ops}
        assert node is not None, "operators of recomputed segments are decided"
        leader = self._clusters.leaders[node]
        found = np.zeros(len(self._clusters.op_nodes[leader.name].options), bool)
        for name in self._read_again(ops):
            found |= (digits(self._clusters.written[name].codes, axes) == SUMS).any(axis=1)
        return found
