"""Builds the operators of plans and the redistributions of their operands.

Equal choices recur in many plans, so each is formatted once and cached.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import Bytes, Seconds
from shardwright.ir.plan import PlannedOp, PlannedTransfer
from shardwright.planner.space.repeats import ShortGraph
from shardwright.planner.space.space import Space
from shardwright.planner.tables.layout_codes import duals
from shardwright.planner.tables.memory import kept_bytes
from shardwright.rules.naming import dimension_names, split_words
from shardwright.rules.placements import tiling_text
from shardwright.solve.elimination.problem import Ints

# The code of a layout, and whether a gathered copy is freed and gathered again.
StoredLayout = tuple[int, bool]
ANYWHERE: StoredLayout = (0, False)  # of inputs and constants, which are replicated


class OperandTransfers(NamedTuple):
    """The transfers of one operand to the layout that its operator reads, and of its gradient.

    `wanted` are the codes of both layouts.
    """

    value: str
    wanted: tuple[int, int]
    transfers: tuple[PlannedTransfer, ...]


class PlanEntry(NamedTuple):
    """One operator of a plan, its transfers, and the layouts of its results.

    `transfers` are those of outputs of the step, and those inside the operator.
    """

    op: PlannedOp
    operand_transfers: tuple[OperandTransfers, ...]
    transfers: tuple[PlannedTransfer, ...]
    layouts: dict[str, StoredLayout]


class PlannedCall(NamedTuple):
    """An operator of the whole graph with the inputs of its plan entry.

    Attributes:
        op: the operator.
        short_op: its representative in the short graph.
        options: its option under each choice of its node.
        values: the operands whose transfers no earlier operator lists.
        form: operands and outputs in the representative's names; equal forms have equal entries.
    """

    op: Op
    short_op: Op
    options: list[int]
    values: tuple[str, ...]
    form: tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, ...]]


class _Pattern(NamedTuple):
    """The plan entry of all operators of a form under an option, with indices for values."""

    op: PlannedOp
    operand_transfers: tuple[
        tuple[int, OperandTransfers], ...
    ]  # by the index in `PlannedCall.values`
    returned: tuple[tuple[int, PlannedTransfer], ...]  # by the number of the output
    internal_reductions: tuple[PlannedTransfer, ...]
    results: tuple[StoredLayout, ...]


class Again(NamedTuple):
    """The recomputed segment of an operator, 0 for none, and whether it runs once there."""

    segment: int
    kept: bool = False


@final
class PlanEntries:
    """Plan entries of the operators of `graph` under options of `space`, of its short graph."""

    def __init__(self, space: Space, graph: Graph, short: ShortGraph) -> None:
        self.space = space
        self.graph = graph
        self._stands_for = short.stands_for
        self._short_ops = {op.name: op for op in space.model.graph.ops}
        self._known: dict[object, PlanEntry] = {}
        self._patterns: dict[object, _Pattern] = {}

    @cached_property
    def calls(self) -> list[PlannedCall]:
        """Every operator, in order."""
        shared = {
            (reading.value, op.name): reading.readers[0].name
            for reading in self.space.readings
            for op in reading.readers
        }
        returned = {*self.graph.outputs, *(value for _, value in self.graph.updates)}
        found = []
        for op in self.graph.ops:
            short_op = self._short_ops[self._stands_for.get(op.name, op.name)]
            positions: dict[str, list[int]] = {}
            for position, value in enumerate(op.operands):
                positions.setdefault(value, []).append(position)
            reads = {
                value: (short_op.operands[at[0]], tuple(at))
                for value, at in positions.items()
                if shared.get((short_op.operands[at[0]], short_op.name), short_op.name)
                == short_op.name
            }
            out = tuple(i for i, value in enumerate(op.outputs) if value in returned)
            form = tuple(reads.values()), out
            options = self.space.op_nodes[short_op.name].options.tolist()
            found.append(PlannedCall(op, short_op, options, tuple(reads), form))
        return found

    def of(
        self, call: PlannedCall, k: int, again: Again, sources: tuple[StoredLayout, ...]
    ) -> PlanEntry:
        """The plan entry of an operator under its option `k`, given the layouts of its operands."""
        key = call.op.name, k, again, sources
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._step(call, k, again, sources)
        return found

    def _step(
        self, call: PlannedCall, k: int, again: Again, sources: tuple[StoredLayout, ...]
    ) -> PlanEntry:
        runs = Again(int(again.segment > 0), again.kept)
        key = call.short_op.name, k, runs, sources, call.form
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = self._pattern(call, k, runs, sources)
        op = call.op
        operand_transfers = []
        for index, one in pattern.operand_transfers:
            value = call.values[index]
            moved = tuple(_of(t, value, op.name) for t in one.transfers)
            operand_transfers.append(OperandTransfers(value, one.wanted, moved))
        transfers = [_of(t, op.outputs[i], t.consumer) for i, t in pattern.returned]
        transfers += [_of(t, op.outputs[0], op.name) for t in pattern.internal_reductions]
        reads = tuple(dict.fromkeys(op.operands))
        planned = replace(
            pattern.op,
            name=op.name,
            source=op.source,
            segment=again.segment,
            reads=reads,
            kept=again.kept,
        )
        layouts = dict(zip(op.outputs, pattern.results, strict=True))
        return PlanEntry(planned, tuple(operand_transfers), tuple(transfers), layouts)

    def _pattern(
        self, call: PlannedCall, k: int, runs: Again, sources: tuple[StoredLayout, ...]
    ) -> _Pattern:
        """The plan entry of operators of one form, given the layouts of their operands.

        The operands of a kept operator exist again once its segment is recomputed.
        """
        reads_again, again = bool(runs.segment), bool(runs.segment) and not runs.kept
        model, short_op, (reads, out) = self.space.model, call.short_op, call.form
        options = model.options(short_op)
        operand_transfers: list[tuple[int, OperandTransfers]] = []
        for index, ((rep, at), (code, regathered)) in enumerate(zip(reads, sources, strict=True)):
            wants = dict.fromkeys(
                (int(options.operands[i][k]), int(options.grads[i][k])) for i in at
            )
            for want in wants:
                moved = self._moved(short_op, rep, (code, reads_again, regathered), want)
                if moved:
                    operand_transfers.append((index, OperandTransfers(rep, want, tuple(moved))))
        codes = [int(result[k]) for result in options.results]
        returned = [(i, t) for i in out for t in model.returned(short_op.outputs[i], codes[i])]
        internal_reductions = tuple(model.internal_transfers(short_op, k, again))
        return _Pattern(
            self._operator(short_op, k, runs, internal_reductions),
            tuple(operand_transfers),
            tuple(returned),
            internal_reductions,
            tuple((code, False) for code in codes),
        )

    @cached_property
    def _words(self) -> dict[int, str]:
        return dimension_names(self.space.model.graph, self.space.model.analysis)

    @cached_property
    def _kept_bytes(self) -> dict[str, Ints]:
        """Bytes that operators take in addition if they are kept, for each option."""
        return {one.op.name: one.bytes for one in self.space.kept_operators}

    def _operator(
        self, short_op: Op, k: int, runs: Again, internal_reductions: Sequence[PlannedTransfer]
    ) -> PlannedOp:
        model = self.space.model
        rule, options = model.analysis.rules[short_op.name], model.options(short_op)
        together = self.space.recomputed[short_op.name] if runs.segment else ()
        table, more, freed = model.operator(short_op, together, runs.kept), 0, 0
        if runs.kept and short_op.name in self._kept_bytes:
            more = int(self._kept_bytes[short_op.name][k])
        if together and not runs.kept:
            freed = int(self._not_kept(short_op, together)[k])
        tiling = options.tiling(rule, k)
        return PlannedOp(
            name=short_op.name,
            target=short_op.target,
            source=short_op.source,
            tiling=tiling_text(tiling),
            splits=split_words(rule, tiling, self._words),
            layout=model.layout(short_op.outputs[0], int(options.results[0][k])),
            seconds=Seconds(float(table.seconds[k]) - sum(t.seconds for t in internal_reductions)),
            saved_bytes=Bytes(int(table.bytes[k]) + more),
            backward_seconds=Seconds(float(model.backward_seconds(short_op)[k])),
            freed_bytes=Bytes(freed),
        )

    def _not_kept(self, short_op: Op, together: Collection[str]) -> Ints:
        """Bytes that only the operators `together` save of an operator, for each option: (K,)."""
        model, savers = self.space.model, self.space.model.meshless.retention.savers
        only = tuple(
            bool(savers.get(name)) and savers[name] <= frozenset(together)
            for name in short_op.outputs
        )
        work, sizes = model.meshless.workload(short_op), model.options(short_op).sizes
        return kept_bytes(work, only, short_op.extra_saved, sizes, short_op.extra_rows)

    def _moved(
        self, short_op: Op, rep: str, source: tuple[int, bool, bool], want: tuple[int, int]
    ) -> Sequence[PlannedTransfer]:
        """The transfers of a value, and of its gradient, to the layout that `short_op` reads."""
        code, recomputed, regathered = source
        moved = code != want[0]
        if not moved and self.space.model.has_gradient(rep, short_op):
            axes = len(self.space.model.mesh.axes)
            moved = int(duals(np.array([code]), axes)[0]) != want[1]
        if not moved:
            return ()
        return self.space.model.transfers(rep, code, want, short_op, regathered, recomputed)


def _of(t: PlannedTransfer, value: str, consumer: str) -> PlannedTransfer:
    """`t` with another value and consumer."""
    return PlannedTransfer(value, consumer, t.phase, t.collectives, t.bytes, t.seconds, t.times)
