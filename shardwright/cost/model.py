"""The cost model: every operator, parameter and edge of one graph as a table over tilings.

Tables add up: seconds and bytes of a plan are the sums over operators,
parameters and edges of the entries that it chose. Prices depend on shapes,
layouts and flags and never on names, so repeated layers share their tables:
equal questions are answered with the *same* array objects, which are read-only.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.book import LayoutBook, Wants
from shardwright.cost.collectives import memory_pass, priced_steps, redistribution_seconds
from shardwright.cost.compute import Workload, operator_seconds, workload
from shardwright.cost.layouts import TilingLayouts, local_bytes, local_sizes
from shardwright.cost.memory import (
    fixed_bytes,
    kept_bytes,
    retention,
    state_tensors,
    workspace_bytes,
)
from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, Op
from shardwright.ir.layout import Atoms, Bytes, Layout, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.plan import Transfer
from shardwright.rules.analysis import Analysis
from shardwright.rules.rule import Tiling


class Table(NamedTuple):
    """Costs of choices: `[K]` for a node, `[Ks, Kt]` for an edge (source choice, target choice)."""

    seconds: NDArray[np.float64]
    bytes: NDArray[np.int64]


@final
class CostModel:
    """Prices tilings of `graph` on the first devices of `machine`, arranged as `mesh`.

    Raises `ValueError` for a mesh that the machine cannot hold and
    `OptimizerError` for an optimizer whose state is not known.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        machine: Machine,
        mesh: Mesh,
        optimizer: str = "adamw",
    ) -> None:
        self.graph = graph
        self.analysis = analysis
        self.machine = machine
        self.mesh = mesh
        self._states = state_tensors(optimizer)
        self._retention = retention(graph)
        self._book = LayoutBook(mesh, analysis.rules)
        self._workloads: dict[str, Workload] = {}
        self._tables: dict[Hashable, Table] = {}
        self._prices: dict[tuple[Atoms, int, int, int], Seconds] = {}
        self._sizes: dict[tuple[Atoms, int, int], Bytes] = {}

    def layouts(self, op: Op, tilings: Sequence[Tiling]) -> tuple[TilingLayouts, ...]:
        """Where everything lies, per tiling; equal operators share the very same objects."""
        return self._book.layouts(op, tilings)

    def operator(self, op: Op, tilings: Sequence[Tiling]) -> Table:
        """Seconds of `op` forward and backward, and bytes of its own results kept for backward."""
        rule, work = self.analysis.rules[op.name], self._workload(op)
        sizes = tuple(local_sizes(rule, tiling, self.mesh) for tiling in tilings)
        stays = tuple(name in self._retention.at_producer for name in op.outputs)
        key = (work, stays, op.extra_saved, sizes)
        if key not in self._tables:
            cost = {
                local: (
                    operator_seconds(work, local, self.machine.device),
                    kept_bytes(work, stays, op.extra_saved, local),
                )
                for local in dict.fromkeys(sizes)
            }
            self._tables[key] = _node_table([cost[local] for local in sizes])
        return self._tables[key]

    def parameter(self, leaf: Leaf, layouts: Sequence[Layout]) -> Table:
        """Seconds of the optimizer's update, and bytes of weight, gradient and optimizer state.

        The update is bound by memory: it reads weight, gradient and state once
        and writes weight and state. A frozen parameter has only its weight.
        """
        tensor = self.graph.tensor[leaf.name]
        atoms, item = self.analysis.atoms[leaf.name], ITEM_BYTES[tensor.dtype]
        indices = tuple(self._book.number(layout) for layout in layouts)
        key = (atoms, item, tensor.requires_grad, indices)
        if key not in self._tables:
            held = [self._local_bytes(atoms, item, i) for i in indices]
            if tensor.requires_grad:
                moved = 3 + 2 * self._states
                rows = [
                    (memory_pass(moved * size, self.machine), Bytes((2 + self._states) * size))
                    for size in held
                ]
            else:
                rows = [(Seconds(0.0), size) for size in held]
            self._tables[key] = _node_table(rows)
        return self._tables[key]

    def edge(
        self,
        value: str,
        sources: Sequence[Layout],
        op: Op,
        positions: Sequence[int],
        tilings: Sequence[Tiling],
    ) -> Table:
        """What it takes to bring `value` from each source layout to what `op` wants, and back.

        `sources` are the producer's (or the storage's) layouts of the value,
        `positions` the operands of `op` that read it. Seconds of the forward
        redistribution and, where a gradient comes back, of the backward one to the
        source's dual. Positions that want equal layouts share one
        redistribution. Bytes are those that `Retention` has the edge pay.
        """
        tensor = self.graph.tensor[value]
        atoms, item = self.analysis.atoms[value], ITEM_BYTES[tensor.dtype]
        wants = self._book.wants(op, positions, tilings, self._has_gradient(value, op))
        edge = (value, op.name)
        pays = edge in self._retention.at_edge
        pays_copies = edge in self._retention.copies
        origins = tuple(self._book.number(layout) for layout in sources)
        key = (atoms, item, pays, pays_copies, origins, wants)
        if key not in self._tables:
            self._tables[key] = self._edge_table(atoms, item, pays, pays_copies, origins, wants)
        return self._tables[key]

    def transfers(
        self, value: str, source: Layout, op: Op, positions: Sequence[int], tiling: Tiling
    ) -> tuple[Transfer, ...]:
        """The redistributions of one edge of a plan; their seconds sum to the edge's."""
        atoms, item = self.analysis.atoms[value], ITEM_BYTES[self.graph.tensor[value].dtype]
        (placed,) = self.layouts(op, [tiling])
        back = self._has_gradient(value, op)
        ways: list[tuple[bool, Layout, Layout]] = []
        for wanted, grad in dict.fromkeys(
            (placed.operands[i], placed.operand_grads[i] if back else None) for i in positions
        ):
            ways.append((False, source, wanted))
            if grad is not None:
                ways.append((True, grad, source.dual()))
        found = []
        for backward, src, dst in ways:
            steps = list(priced_steps(atoms, item, src, dst, self.machine))
            if steps:
                names = self.mesh.names
                found.append(
                    Transfer(
                        value=value,
                        consumer=op.name,
                        backward=backward,
                        collectives=tuple(
                            f"{s.collective.value} {names[s.axis]}" for s, _, _ in steps
                        ),
                        bytes=max(size for _, size, _ in steps),
                        seconds=Seconds(sum(seconds for _, _, seconds in steps)),
                    )
                )
        return tuple(found)

    def transient_bytes(self, tilings: Mapping[str, Tiling]) -> Bytes:
        """Allowance for what lives only while an operator runs: the largest operator's workspace.

        A maximum, so no part of the tables: add it to the sum of a finished assignment.
        """
        return max(
            (
                workspace_bytes(
                    self._workload(op),
                    local_sizes(self.analysis.rules[op.name], tilings[op.name], self.mesh),
                )
                for op in self.graph.ops
            ),
            default=Bytes(0),
        )

    def fixed_bytes(self) -> Bytes:
        """What every rank holds under every plan: inputs, buffers and constants."""
        return fixed_bytes(self.graph)

    def _edge_table(
        self,
        atoms: Atoms,
        item: int,
        pays: bool,
        pays_copies: bool,
        origins: tuple[int, ...],
        wants: Wants,
    ) -> Table:
        """Prices between the different layouts only, then spread over the choices."""
        source_kinds = {origin: i for i, origin in enumerate(dict.fromkeys(origins))}
        want_kinds = {want: i for i, want in enumerate(dict.fromkeys(wants))}
        seconds = np.zeros((len(source_kinds), len(want_kinds)))
        held = np.zeros((len(source_kinds), len(want_kinds)), dtype=np.int64)
        for source, i in source_kinds.items():
            dual = self._book.number(self._book[source].dual())
            for want, j in want_kinds.items():
                for operand, grad in want:
                    seconds[i, j] += self._price(atoms, item, source, operand)
                    if grad is not None:
                        seconds[i, j] += self._price(atoms, item, grad, dual)
                    if pays or (pays_copies and operand != source):
                        held[i, j] += self._local_bytes(atoms, item, operand)
        spread = np.ix_(
            [source_kinds[origin] for origin in origins], [want_kinds[want] for want in wants]
        )
        return _frozen(seconds[spread], held[spread])

    def _price(self, atoms: Atoms, item: int, src: int, dst: int) -> Seconds:
        if src == dst:
            return Seconds(0.0)
        key = (atoms, item, src, dst)
        if key not in self._prices:
            layouts = self._book[src], self._book[dst]
            self._prices[key] = redistribution_seconds(atoms, item, *layouts, self.machine)
        return self._prices[key]

    def _local_bytes(self, atoms: Atoms, item: int, layout: int) -> Bytes:
        key = (atoms, item, layout)
        if key not in self._sizes:
            self._sizes[key] = local_bytes(atoms, item, self._book[layout])
        return self._sizes[key]

    def _has_gradient(self, value: str, op: Op) -> bool:
        """Whether a gradient comes back over this edge."""
        tensor = self.graph.tensor
        return tensor[value].requires_grad and any(tensor[r].requires_grad for r in op.outputs)

    def _workload(self, op: Op) -> Workload:
        if op.name not in self._workloads:
            rule = self.analysis.rules[op.name]
            self._workloads[op.name] = workload(op, rule, self.graph)
        return self._workloads[op.name]


def _node_table(rows: Sequence[tuple[Seconds, Bytes]]) -> Table:
    seconds = np.array([seconds for seconds, _ in rows], dtype=np.float64)
    return _frozen(seconds, np.array([held for _, held in rows], dtype=np.int64))


def _frozen(seconds: NDArray[np.float64], held: NDArray[np.int64]) -> Table:
    """A table that nobody can write to, as it is shared."""
    seconds.flags.writeable = False
    held.flags.writeable = False
    return Table(seconds, held)
