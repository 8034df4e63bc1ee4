"""Costs of tilings on a machine, as tables over the options of a graph's operators.

Tables are additive: seconds and bytes of a plan are the sums, over operators, parameters and edges,
of the entries that it selects. Prices depend on shapes, layouts and flags and not on names, so
repeated layers share their tables: equal queries return the *same* read-only array objects. Layouts
are codes (`layout_codes.py`), and a table is computed in one array operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import final

import numpy as np

from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, Op, Tensor
from shardwright.ir.layout import Bytes, Layout, Mesh, Seconds
from shardwright.ir.plan import Phase, PlannedTransfer
from shardwright.machine.model import Machine
from shardwright.planner.communication.expert_all_to_all import ExpertAllToAll, exchanged, exchanges
from shardwright.planner.communication.intra_op_collectives import IntraOpCollectives
from shardwright.planner.communication.resharding import (
    NO_GRADIENT,
    Bools,
    Floats,
    Passes,
    Reads,
    Table,
    Terms,
    Want,
)
from shardwright.planner.communication.transfers import Rounds, moves_of, transfers
from shardwright.planner.tables.layout_codes import WHOLE, Ints, decode, storable
from shardwright.planner.tables.memory import (
    bucket_sizes,
    fixed_bytes,
    kept_bytes,
    workspace_bytes,
)
from shardwright.planner.tables.mesh_invariants import MeshInvariants, SharedTables
from shardwright.planner.tables.objective import Duration
from shardwright.planner.tables.options import Allowed, OptionCache, Options, Tilings
from shardwright.planner.tables.parameter_casts import cast_seconds
from shardwright.planner.tables.pricing import OF_A_STEP, Pricing
from shardwright.planner.tables.update import UpdateTables
from shardwright.rules.analysis import Analysis
from shardwright.simulate.costs.compute import backward_seconds

EVERYTHING = Allowed()


@final
class CostModel:
    """Prices tilings of `graph` on the first devices of `machine`, arranged as `mesh`.

    Args:
        graph: with micro-batches, the graph of one of them (`rules.micro_graph`); seconds are those
            of all micro-batches.
        analysis: the analysis of `graph`.
        machine: prices operators and messages.
        mesh: the arrangement of the devices.
        pricing: the objective and the kind of step.
        allowed: the allowed choices of operators and parameters; by default all.
        meshless: mesh-independent values, which models on several meshes may share.
        like: a model that differs in nothing but `allowed`, names of axes and the form of the loss,
            to share its tables.

    Raises:
        ValueError: the machine cannot hold the mesh.
        OptimizerError: the state of the optimizer is not known.
    """

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        machine: Machine,
        mesh: Mesh,
        pricing: Pricing = OF_A_STEP,
        allowed: Allowed = EVERYTHING,
        meshless: MeshInvariants | None = None,
        like: CostModel | None = None,
    ) -> None:
        self.graph = graph
        self.analysis = analysis
        self.machine = machine
        self.mesh = mesh
        self._allowed = allowed
        self.micro_batches = pricing.micro_batches
        self.gradient_sync = pricing.gradient_sync
        self.compiled = pricing.compiled
        self.measure = pricing.measure or Duration(machine, mesh)
        self.update = UpdateTables(graph, mesh, self.measure, pricing.optimizer)
        self._intra_op = IntraOpCollectives(graph, analysis, machine, mesh, self.measure)
        self._options: dict[str, Options] = {}
        self.buckets = pricing.buckets or bucket_sizes(graph)
        if like is None:
            known = meshless or MeshInvariants.under(pricing, graph, analysis, machine)
            passes = Passes(self.micro_batches, self.buckets, self.gradient_sync)
            reads = Reads(graph, analysis, mesh, self.measure, passes)
            self._shared = SharedTables(known, OptionCache(mesh, known.forms), reads)
        elif like.graph is graph:
            self._shared = like._shared
        else:
            assert meshless is not None, "another form of the graph has values of its own"
            passes = Passes(self.micro_batches, self.buckets, self.gradient_sync)
            given = graph, analysis, mesh, self.measure, passes, like._shared.reads
            self._shared = like._shared.of(meshless, Reads(*given))
        self.meshless, self._reads = self._shared.meshless, self._shared.reads
        self._retention, self._tables = self.meshless.retention, self._shared.tables

    def options(self, op: Op) -> Options:
        """The options of `op`; equal operators share one object."""
        if op.name not in self._options:
            only = self._allowed.operators.get(op.name)
            tilings = self._allowed.tilings.get(op.name)
            rule = self.analysis.rules[op.name]
            self._options[op.name] = self._shared.options.options(rule, only, tilings)
        return self._options[op.name]

    def with_allowed(self, allowed: Allowed) -> CostModel:
        """The same cost model with other allowed choices."""
        given = self.update.optimizer, self.measure, self.micro_batches, self.buckets
        pricing = Pricing(*given, self.gradient_sync, self.compiled)
        mine = self.graph, self.analysis, self.machine, self.mesh
        return CostModel(*mine, pricing, allowed, self.meshless, like=self)

    def with_tilings(self, tilings: Mapping[str, Tilings]) -> CostModel:
        """The same cost model with only these `tilings` of the named operators."""
        return self.with_allowed(replace(self._allowed, tilings=tilings))

    def operator(self, op: Op, recomputed: Collection[str] = (), once: bool = False) -> Table:
        """Seconds of `op` forward and backward, and bytes of its results kept for backward: (K,).

        `recomputed` are the operators of its recomputed segment. If `op` is one of them, it runs
        forward twice and keeps only the results that operators outside of the segment save. With
        `once` the seconds of the second run are left out.
        """
        work, options = self.meshless.workload(op), self.options(op)
        stays = tuple(self.stays(name, recomputed) for name in op.outputs)
        again = op.name in recomputed and not once
        extra = (0, 0) if op.name in recomputed else (op.extra_saved, op.extra_rows)
        key = (id(work), stays, extra, id(options), again)
        if key not in self._tables:
            seconds = self.measure.operator(work, options.sizes, again)
            seconds = seconds + self._intra_op.seconds(op, work, options, again)
            if (sent := self._exchanges(op)) is not None:
                seconds = seconds + sent.seconds(again)
            seconds = seconds * self.micro_batches
            memory = kept_bytes(work, stays, extra[0], options.sizes, extra[1])
            self._tables[key] = Table(seconds, memory).frozen()
        return self._tables[key]

    def backward_seconds(self, op: Op) -> Floats:
        """The part of the seconds of `op` that computes gradients: (K,)."""
        work, options = self.meshless.workload(op), self.options(op)
        key = id(work), id(options)
        known = self._shared.backward
        if key not in known:
            seconds = np.zeros(len(options))
            if work.has_backward:
                seconds = backward_seconds(work, options.sizes, self.machine.device)
            known[key] = seconds * self.micro_batches
        return known[key]

    def workspace(self, op: Op) -> Ints:
        """Bytes in use only while `op` runs: (K,). A plan needs their maximum, not their sum."""
        work, options = self.meshless.workload(op), self.options(op)
        key = (id(work), id(options))
        known = self._shared.workspaces
        if key not in known:
            known[key] = workspace_bytes(work, options.sizes)
        return known[key]

    def storable(self, leaf: Leaf) -> Ints:
        """Codes of the layouts in which a parameter may be stored; equal ones share an array."""
        key = self.analysis.atoms[leaf.name], self._allowed.parameters.get(leaf.name)
        known = self._shared.storable
        if key not in known:
            atoms, only = key
            known[key] = storable(atoms, self.mesh, only)
        return known[key]

    def parameter(self, leaf: Leaf, layouts: Ints) -> Table:
        """Seconds of the optimizer's update, and bytes of weight, gradient and optimizer state.

        A parameter without a gradient has only its weight. A parameter that is stored in a wider
        dtype than that in which it is read also has a cast, kept from forward to backward.
        """
        trained = leaf.name in self.graph.trained
        tensor = self.graph.tensor[leaf.name]
        kind = tensor.dtype, tensor.gathered_as
        key = (self.analysis.atoms[leaf.name], kind, trained, _key(layouts))
        if key not in self._tables:
            reads = self._reads
            compute_bytes = reads.local_bytes(leaf.name, layouts)
            stored_ratio = reads.gradient_bytes(leaf.name) // reads.item_bytes(leaf.name)
            memory = stored_ratio * compute_bytes
            cast = compute_bytes if stored_ratio > 1 else 0 * compute_bytes
            seconds = cast_seconds(self.measure, self.graph, leaf.name, memory, compute_bytes)
            if trained:
                whole, spec = self.update.stored(leaf.name), self.update.spec
                seconds = seconds + self.update.seconds(leaf.name, memory)
                seconds = seconds + self._gathers_for_update(whole, layouts)
                kept = spec.kept_of(whole.shape) * ITEM_BYTES[whole.dtype]
                memory = (2 + spec.resident_of(whole.shape)) * memory + kept
            memory = cast if self.update.spec.by_host else memory + cast
            self._tables[key] = Table(seconds, memory).frozen()
        return self._tables[key]

    def seconds_on_device(self, leaf: Leaf, layouts: Ints) -> Floats:
        """The seconds of `parameter` with all of it on the device, without copies: (K,)."""
        seconds, _ = self.parameter(leaf, layouts)
        if not self.update.spec.offload or leaf.name not in self.graph.trained:
            return seconds
        tiles = self._reads.local_bytes(leaf.name, layouts) // self._reads.item_bytes(leaf.name)
        given = leaf.name, tiles * self._reads.gradient_bytes(leaf.name)
        return seconds + self.update.seconds_on_device(*given) - self.update.seconds(*given)

    def _gathers_for_update(self, whole: Tensor, layouts: Ints) -> Floats | float:
        """Seconds to gather a matrix that is updated whole, from each layout."""
        matrix = self.update.spec.matrix_of(whole.shape)
        if matrix is None:
            return 0.0
        item_bytes = ITEM_BYTES[matrix.dtype or whole.dtype]
        target = np.full_like(layouts, WHOLE)
        return self.measure.redistributions(
            self.analysis.atoms[whole.name], item_bytes, layouts, target
        )

    def want(self, value: str, op: Op, position: int) -> Want:
        """The layouts in which `op` reads `value` at `position`, per option."""
        options = self.options(op)
        layout, grad = options.operands[position], options.grads[position]
        return Want(layout, grad if self.has_gradient(value, op) else np.zeros_like(grad))

    def edge(
        self,
        value: str,
        sources: Ints,
        op: Op,
        positions: Sequence[int],
        regathered: Bools | None = None,
        recomputed: bool = False,
    ) -> Table:
        """The cost of redistributing `value` to the layouts that `op` reads: (Ks, K).

        Seconds are those of the forward redistribution and, where there is a gradient, of the
        backward one to the source's dual. Positions that read equal layouts share one
        redistribution. Bytes are those that `Retention` attributes to the edge.

        Args:
            value: the value.
            sources: codes of its layouts at the producer or in storage, (Ks,).
            op: the reader.
            positions: the indices of the operands of `op` that are `value`.
            regathered: of a parameter, sources from which a copy that is read in the backward
                pass is made twice and not kept, (Ks,).
            recomputed: whether the reader is recomputed. It reads copies of parameters twice, and
                makes every other copy twice.
        """
        pays, copies = self._pays(value, op)
        weight, kept = self._reads.is_parameter(value), self._reads.kept(value)
        copies = copies or (weight and recomputed)
        twice = regathered if copies else None
        if recomputed and not weight:
            twice = np.ones(len(sources), bool)
        atoms, item = self.analysis.atoms[value], self._reads.item_bytes(value)
        back, options = self._reads.gradient_reduction(value, op), self.options(op)
        converted = not self.measure.redistributes_once and value in op.saves  # backward, too
        bucketed = len(positions) == 1 and self._reads.bucketed(value, op)
        late = self._unawaited(value, [op], recomputed)
        shares = bucketed, bucketed, recomputed
        terms = Terms(weight, back, pays, copies, *shares, converted, kept, late)
        again = b"" if twice is None else twice.tobytes()
        sums = self._reads.gradient_bytes(value)
        key = (atoms, item, sums, terms, _key(sources), again, id(options), tuple(positions))
        if key not in self._tables:
            first, *others = wants = [self.want(value, op, position) for position in positions]
            seconds, memory = self._reads.read(value, sources, first, terms).table(twice)
            for i, want in enumerate(others, 1):
                shared = np.zeros(len(options), bool)
                for other in wants[:i]:
                    shared |= (want.layout == other.layout) & (want.grad == other.grad)
                one = self._reads.read(value, sources, want, terms).table(twice)
                seconds = seconds + np.where(shared, 0.0, one.seconds)
                memory = memory + np.where(shared, 0, one.bytes)
            self._tables[key] = Table(seconds, memory).frozen()
        return self._tables[key]

    def shared_read(
        self,
        value: str,
        sources: Ints,
        want: Want,
        readers: Sequence[Op],
        recomputed: bool = False,
    ) -> Table:
        """Like `edge`, for one redistribution that all `readers` share."""
        paid = [self._pays(value, op) for op in readers]
        pays, copies = any(all_of for all_of, _ in paid), any(moved for _, moved in paid)
        back = max(self._reads.gradient_reduction(value, op) for op in readers)
        atoms, item = self.analysis.atoms[value], self._reads.item_bytes(value)
        deferrable_scalars = self._unawaited(value, readers, recomputed)
        kept = self._reads.kept(value)
        weight = self._reads.is_parameter(value)
        terms = Terms(weight, back, pays, copies, kept=kept, deferrable_scalars=deferrable_scalars)
        layouts = _key(want.layout), _key(want.grad)
        sums = self._reads.gradient_bytes(value)
        key = (atoms, item, sums, terms, recomputed, _key(sources), *layouts)
        if key not in self._tables:
            twice = np.ones(len(sources), bool) if recomputed else None
            one = self._reads.read(value, sources, want, terms)
            self._tables[key] = one.table(twice).frozen()
        return self._tables[key]

    def reads_copy_twice(self, value: str, op: Op, recomputed: bool) -> bool:
        """Whether `op` reads a redistributed copy of a parameter in the backward pass, too."""
        return recomputed or (value, op.name) in self._retention.copies

    def kept_in_place(self, value: str, op: Op, layouts: Ints) -> Ints | None:
        """Bytes that `op` pays for `value`, which it reads in `layouts`; None if it pays none."""
        pays, _ = self._pays(value, op)
        return self._reads.local_bytes(value, layouts) if pays else None

    def kept_for(self, value: str, recomputed: Collection[str], layouts: Ints) -> Ints | None:
        """Bytes of `value` in `layouts`, kept because `recomputed` operators read it.

        None if the producer of the value, or of the value that it is a view of, pays already.
        """
        root = value
        while alias := self.graph.tensor[root].alias_of:
            root = alias
        return None if self.stays(root, ()) else self._reads.local_bytes(value, layouts)

    def stays(self, value: str, recomputed: Collection[str]) -> bool:
        """Whether the producer of `value` pays for it if `recomputed` operators save nothing."""
        savers = self._retention.savers
        return value in self._retention.at_producer and any(
            saver not in recomputed for saver in savers[value]
        )

    def returning(self, value: str, sources: Ints) -> Floats:
        """Seconds to replicate an output of the step from each of `sources`: (N,) -> (N,)."""
        if (value, "") in self.meshless.deferrable_scalars:
            return np.zeros(len(sources))
        return self._reads.returned(value, sources)

    def transfers(
        self,
        value: str,
        source: int,
        want: tuple[int, int],
        op: Op,
        regathered: bool = False,
        recomputed: bool = False,
    ) -> list[PlannedTransfer]:
        """The redistributions of one read; if nothing is hidden, their seconds sum to the edge's.

        The forward redistribution is repeated in the backward pass where no copy is kept for it: of
        a `regathered` parameter, and of another value if its reader is `recomputed`.
        """
        again = recomputed
        if self._reads.is_parameter(value):
            again = regathered and self.reads_copy_twice(value, op, recomputed)
        axes, back = len(self.mesh.axes), self._reads.gradient_reduction(value, op)
        kept = self._reads.kept(value)
        rounds = Rounds(self.micro_batches, again=again, kept=kept, sync=self.gradient_sync)
        moves = moves_of(source, want, back, axes, rounds)
        atoms, item = self.analysis.atoms[value], self._reads.item_bytes(value)
        sums = self._reads.sent_gradient_bytes(value)
        bucketed = self._reads.bucketed(value, op)
        terms = Terms(False, back, False, False, bucketed, bucketed and not (again and recomputed))
        wanted = Want(np.array([want[0]]), np.array([want[1]]))
        saved = self._reads.saved(value, np.array([source]), wanted, terms)
        whole = back == NO_GRADIENT or want[1] == WHOLE  # if not, its gradient is summed, too
        deferrable_scalars = whole and self._unawaited(value, [op], recomputed)
        found: list[PlannedTransfer] = []
        for move in moves:
            size = sums if move[0] is Phase.BACKWARD else item
            for one in transfers(value, op.name, [move], atoms, size, self.machine, self.mesh):
                less = 0.0
                if saved is not None:
                    joint = self.gradient_sync is not None  # all reductions are one move
                    each, once = joint or one.times == self.micro_batches, joint or one.times == 1
                    part = saved.of(move[0], each=each, once=once)
                    less = float(part[0, 0]) * one.times
                if deferrable_scalars and move[0] is Phase.FORWARD:
                    less = one.seconds
                found.append(replace(one, seconds=Seconds(one.seconds - less)))
        return found

    def returned(self, value: str, source: int) -> list[PlannedTransfer]:
        """The redistribution of an output of the step to every rank."""
        moves = [(Phase.FORWARD, source, WHOLE, self.micro_batches)]
        atoms, item = self.analysis.atoms[value], self._reads.item_bytes(value)
        found = list(transfers(value, "", moves, atoms, item, self.machine, self.mesh))
        if (value, "") in self.meshless.deferrable_scalars:
            return [replace(one, seconds=Seconds(0.0)) for one in found]
        return found

    def internal_transfers(self, op: Op, k: int, again: bool = False) -> list[PlannedTransfer]:
        """The transfers inside `op` under its option `k`.

        With `again` the forward pass runs once more in the backward pass.
        """
        found: list[PlannedTransfer] = []
        if (sent := self._exchanges(op)) is not None:
            made = exchanged(sent, k, self.mesh, self.micro_batches, again=again)
            found += (replace(one, value=op.outputs[0], consumer=op.name) for one in made)
        options, times = self.options(op), self.micro_batches
        work = self.meshless.workload(op)
        return found + self._intra_op.transfers(op, work, options, k, again, times)

    def layout(self, value: str, code: int) -> Layout:
        """The layout of `value` with this code."""
        return decode(code, self.analysis.atoms[value], self.mesh)

    def fixed_bytes(self) -> Bytes:
        """Bytes of inputs, buffers and constants, which every rank holds under every plan."""
        return fixed_bytes(self.graph)

    def has_gradient(self, value: str, op: Op) -> bool:
        """Whether a gradient flows back over this edge."""
        return self._reads.has_gradient(value, op)

    def _exchanges(self, op: Op) -> ExpertAllToAll | None:
        """The exchanges of rows of `op`; None if it has no routes."""
        rule = self.analysis.rules[op.name]
        if not rule.routes or not self.mesh.axes:
            return None
        work, options = self.meshless.workload(op), self.options(op)
        known, key = self._shared.exchanged, (id(work), id(options))
        if key not in known:
            known[key] = exchanges(rule, work, options, self.measure, self.mesh)
        return known[key]

    def _unawaited(self, value: str, readers: Sequence[Op], recomputed: bool) -> bool:
        """Whether `value` is a deferrable scalar for all `readers`."""
        late = self.meshless.deferrable_scalars
        return not recomputed and all((value, op.name) in late for op in readers)

    def _pays(self, value: str, op: Op) -> tuple[bool, bool]:
        edge = (value, op.name)
        return edge in self._retention.at_edge, edge in self._retention.copies


def _key(codes: Ints) -> bytes:
    return codes.tobytes()
