"""What tilings cost on a machine, as tables over the options of a graph's operators.

Tables add up: seconds and bytes of a plan are the sums over operators,
parameters and edges of the entries that it chose. Prices depend on shapes,
layouts and flags and never on names, so repeated layers share their tables:
equal questions are answered with the *same* array objects, which are read-only.
Layouts are codes (`codes.py`), and a table is computed in one go.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.codes import (
    Ints,
    decode,
    digits,
    duals,
    layouts_of,
    local_elements,
    most_layouts,
    storable,
    summed_gradients,
)
from shardwright.cost.collectives import priced_steps
from shardwright.cost.compute import Workload, workload
from shardwright.cost.measure import Duration, Measure
from shardwright.cost.memory import (
    fixed_bytes,
    kept_bytes,
    retention,
    state_tensors,
    workspace_bytes,
)
from shardwright.cost.options import Allowed, Only, OptionBook, Options
from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, LeafKind, Op
from shardwright.ir.layout import Atoms, Bytes, Layout, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.plan import Phase, Transfer
from shardwright.rules.analysis import Analysis

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

EVERYTHING = Allowed()
_LAYOUTS_AT_ONCE = 150  # more than this and only those asked for are priced
_LAYOUTS_LISTED = 5_000  # feasible or not; more than this are not even counted
_NO_GRADIENT, _EACH_TIME, _SUMMED_FIRST = range(3)  # ways of gradients back over an edge


class Table(NamedTuple):
    """Costs of choices: `[K]` for a node, `[Ks, Kt]` for an edge (source choice, target choice)."""

    seconds: Floats
    bytes: Ints


class Want(NamedTuple):
    """How a value is read: its layout, and the layout in which its gradient comes back.

    Without a gradient `grad` is the replicated layout, for nothing.
    """

    layout: Ints
    grad: Ints


@final
class CostModel:
    """Prices tilings of `graph` on the first devices of `machine`, arranged as `mesh`.

    `allowed` is what operators and parameters may do, where that is not all; `measure` says what
    is priced beside memory, by default the seconds of a step.
    With `micro_batches`, `graph` and `analysis` are those of one micro-batch
    (`rules.micro_graph`), and seconds those of all: whatever a micro-batch does
    counts so often, what is done once a step counts once.
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
        allowed: Allowed = EVERYTHING,
        measure: Measure | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.graph = graph
        self.analysis = analysis
        self.machine = machine
        self.mesh = mesh
        self._allowed = allowed
        self.micro_batches = micro_batches
        self._parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        self._states = state_tensors(optimizer)
        self._retention = retention(graph)
        self.measure = measure or Duration(machine, mesh)
        self._book = OptionBook(mesh)
        self._options: dict[str, Options] = {}
        self._workloads: dict[str, Workload] = {}
        self._tables: dict[Hashable, Table] = {}
        self._workspaces: dict[Hashable, Ints] = {}
        self._storable: dict[tuple[Atoms, Only | None], Ints] = {}
        self._matrices: dict[tuple[Atoms, int], tuple[Ints, Floats]] = {}

    def options(self, op: Op) -> Options:
        """What `op` may do; equal operators share the very same options."""
        if op.name not in self._options:
            only = self._allowed.operators.get(op.name)
            self._options[op.name] = self._book.options(self.analysis.rules[op.name], only)
        return self._options[op.name]

    def operator(self, op: Op, recomputed: Collection[str] = ()) -> Table:
        """Seconds of `op` forward and backward, and bytes of its own results kept for backward.

        If it is one of the operators that are `recomputed` together it runs
        forward twice, and keeps only what others than these save.
        """
        work, options = self._workload(op), self.options(op)
        stays = tuple(self._stays(name, recomputed) for name in op.outputs)
        again = op.name in recomputed
        key = (work, stays, op.extra_saved, id(options), again)
        if key not in self._tables:
            seconds = self.measure.operator(work, options.sizes, again) * self.micro_batches
            held = kept_bytes(work, stays, 0 if again else op.extra_saved, options.sizes)
            self._tables[key] = _frozen(seconds, held)
        return self._tables[key]

    def workspace(self, op: Op) -> Ints:
        """Bytes that live only while `op` runs: (K,). Of a plan the largest counts, not the sum."""
        work, options = self._workload(op), self.options(op)
        key = (work, id(options))
        if key not in self._workspaces:
            self._workspaces[key] = workspace_bytes(work, options.sizes)
        return self._workspaces[key]

    def storable(self, leaf: Leaf) -> Ints:
        """Codes of the layouts that a parameter may be stored in; equal parameters share them."""
        key = self.analysis.atoms[leaf.name], self._allowed.parameters.get(leaf.name)
        if key not in self._storable:
            atoms, only = key
            self._storable[key] = storable(atoms, self.mesh, only)
        return self._storable[key]

    def parameter(self, leaf: Leaf, layouts: Ints) -> Table:
        """Seconds of the optimizer's update, and bytes of weight, gradient and optimizer state.

        The update is bound by memory: it reads weight, gradient and state once
        and writes weight and state. A frozen parameter has only its weight.
        """
        tensor = self.graph.tensor[leaf.name]
        key = (self.analysis.atoms[leaf.name], tensor.dtype, tensor.requires_grad, _key(layouts))
        if key not in self._tables:
            held = self._local_bytes(leaf.name, layouts)
            seconds = np.zeros(len(held))
            if tensor.requires_grad:
                moved = (3 + 2 * self._states) * held
                seconds = self.measure.update(moved)
                held = (2 + self._states) * held
            self._tables[key] = _frozen(seconds, held)
        return self._tables[key]

    def want(self, value: str, op: Op, position: int) -> Want:
        """How `op` reads `value` at `position`, per option."""
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
        """What it takes to bring `value` from each source layout to what `op` wants, and back.

        `sources` are the producer's (or the storage's) layouts of the value,
        `positions` the operands of `op` that read it. Seconds of the forward
        redistribution and, where a gradient comes back, of the backward one to the
        source's dual. Positions that want equal layouts share one
        redistribution. Bytes are those that `Retention` has the edge pay. From a
        source that is `regathered` a copy is not kept but made twice, and so it
        is from every source where the reader is `recomputed`.
        """
        pays, copies = self._pays(value, op)
        twice = regathered if copies else None
        if recomputed:
            twice = np.ones(len(sources), bool)
        atoms, item = self.analysis.atoms[value], self._item_bytes(value)
        back, options = self._way_back(value, op), self.options(op)
        converted = not self.measure.brings_once and value in op.saves  # for the backward pass too
        again = b"" if twice is None else twice.tobytes()
        flags = (pays, copies, back, converted)
        key = (atoms, item, flags, _key(sources), again, id(options), tuple(positions))
        if key not in self._tables:
            seconds = np.zeros((len(sources), len(options)))
            held = np.zeros((len(sources), len(options)), np.int64)
            wants = [self.want(value, op, position) for position in positions]
            for i, want in enumerate(wants):
                shared = np.zeros(len(options), bool)
                for other in wants[:i]:
                    shared |= (want.layout == other.layout) & (want.grad == other.grad)
                one = self._read(value, sources, want, back, pays, copies, twice, converted)
                seconds += np.where(shared, 0.0, one.seconds)
                held += np.where(shared, 0, one.bytes)
            self._tables[key] = _frozen(seconds, held)
        return self._tables[key]

    def shared_read(
        self,
        value: str,
        sources: Ints,
        want: Want,
        readers: Sequence[Op],
        recomputed: bool = False,
    ) -> Table:
        """Like `edge`, for one redistribution from which all `readers` read."""
        paid = [self._pays(value, op) for op in readers]
        pays, copies = any(all_of for all_of, _ in paid), any(moved for _, moved in paid)
        back = max(self._way_back(value, op) for op in readers)
        atoms, item = self.analysis.atoms[value], self._item_bytes(value)
        flags = (pays, copies, back, recomputed)
        key = (atoms, item, flags, _key(sources), _key(want.layout), _key(want.grad))
        if key not in self._tables:
            twice = np.ones(len(sources), bool) if recomputed else None
            one = self._read(value, sources, want, back, pays, copies, twice)
            self._tables[key] = _frozen(*one)
        return self._tables[key]

    def keeps_copy(self, value: str, op: Op) -> bool:
        """Whether `op`, where it reads `value` in another layout, keeps the copy for backward."""
        return (value, op.name) in self._retention.copies

    def saves_copies(self, value: str) -> bool:
        """Whether any operator that reads `value` in another layout keeps the copy."""
        return any(self.keeps_copy(value, op) for op in self.graph.consumers[value])

    def kept_in_place(self, value: str, op: Op, layouts: Ints) -> Ints | None:
        """Bytes that `op` pays for `value`, taken as it lies in `layouts`; None if it pays none."""
        pays, _ = self._pays(value, op)
        return self._local_bytes(value, layouts) if pays else None

    def kept_for(self, value: str, recomputed: Collection[str], layouts: Ints) -> Ints | None:
        """Bytes of `value` in `layouts`, kept for operators that are `recomputed` and read it.

        None where the operator that makes it, or what it is a view of, pays for
        it already.
        """
        root = value
        while alias := self.graph.tensor[root].alias_of:
            root = alias
        return None if self._stays(root, ()) else self._local_bytes(value, layouts)

    def redistribution(self, value: str, sources: Ints, targets: Ints) -> Floats:
        """Seconds from each of `sources` to that of `targets`: (N,), (N,) -> (N,)."""
        atoms = self.analysis.atoms[value]
        priced = self.measure.redistributions
        return priced(atoms, self._item_bytes(value), sources, targets) * self.micro_batches

    def transfers(
        self, value: str, source: int, want: tuple[int, int], op: Op, again: bool = False
    ) -> list[Transfer]:
        """The redistributions of one read: their seconds sum to those of the edge.

        The forward one is made `again` in the backward pass where the reader is
        recomputed, or keeps no copy of a parameter that is regathered.
        """
        atoms, item = self.analysis.atoms[value], self._item_bytes(value)
        layout, grad = want
        times = self.micro_batches
        ways = [(Phase.FORWARD, source, layout, times)]
        if again:
            ways.append((Phase.AGAIN, source, layout, times))
        back, axes = self._way_back(value, op), len(self.mesh.axes)
        if back:
            (dual,) = duals(np.array([source]), axes).tolist()
            (summed,) = summed_gradients(np.array([source]), np.array([grad]), axes).ravel()
            first = [(Phase.BACKWARD, grad, int(summed), times)]
            first.append((Phase.BACKWARD, int(summed), dual, 1))
            ways += first if back == _SUMMED_FIRST else [(Phase.BACKWARD, grad, dual, times)]
        found = []
        for phase, start, end, times in ways:
            src, dst = (decode(code, atoms, self.mesh) for code in (start, end))
            steps = list(priced_steps(atoms, item, src, dst, self.machine))
            if steps:
                names = self.mesh.names
                found.append(
                    Transfer(
                        value=value,
                        consumer=op.name,
                        phase=phase,
                        collectives=tuple(
                            f"{s.collective.value} {names[s.axis]}" for s, _, _ in steps
                        ),
                        bytes=max(size for _, size, _ in steps),
                        seconds=Seconds(times * sum(seconds for _, _, seconds in steps)),
                        times=times,
                    )
                )
        return found

    def layout(self, value: str, code: int) -> Layout:
        """The layout of `value` that has this code."""
        return decode(code, self.analysis.atoms[value], self.mesh)

    def transient_bytes(self, chosen: Mapping[str, int]) -> Bytes:
        """Allowance for what lives only while an operator runs: the largest operator's workspace.

        A maximum, so no part of the tables: add it to the sum of a finished
        assignment. `chosen` has the number of each operator's option.
        """
        sizes = (int(self.workspace(op)[chosen[op.name]]) for op in self.graph.ops)
        return Bytes(max(sizes, default=0))

    def fixed_bytes(self) -> Bytes:
        """What every rank holds under every plan: inputs, buffers and constants."""
        return fixed_bytes(self.graph)

    def has_gradient(self, value: str, op: Op) -> bool:
        """Whether a gradient comes back over this edge."""
        tensor = self.graph.tensor
        return tensor[value].requires_grad and any(tensor[r].requires_grad for r in op.outputs)

    def _way_back(self, value: str, op: Op) -> int:
        """Which way gradients take over this edge: none, home each time, or summed up before."""
        if not self.has_gradient(value, op):
            return _NO_GRADIENT
        split = self.micro_batches > 1 and value in self._parameters
        return _SUMMED_FIRST if split else _EACH_TIME

    def _read(
        self,
        value: str,
        sources: Ints,
        want: Want,
        back: int,
        pays: bool,
        copies: bool,
        twice: Bools | None = None,
        converted: bool = False,
    ) -> Table:
        """Prices between the different layouts only, then spread over the choices.

        From sources that are read `twice` nothing is kept between the two times. With `converted`
        the way there is paid for twice all the same.
        """
        source, to_source = np.unique(sources, return_inverse=True)
        layout, to_layout = np.unique(want.layout, return_inverse=True)
        forward = self._matrix(value, source, layout)[np.ix_(to_source, to_layout)]
        seconds = forward = forward * self.micro_batches
        if converted:
            seconds = forward + forward
        axes = len(self.mesh.axes)
        if back == _EACH_TIME:
            dual, to_dual = np.unique(duals(sources, axes), return_inverse=True)
            grad, to_grad = np.unique(want.grad, return_inverse=True)
            backward = self._matrix(value, grad, dual).T[np.ix_(to_dual, to_grad)]
            seconds = seconds + backward * self.micro_batches
        if back == _SUMMED_FIRST:
            seconds = seconds + self._summed(value, sources, want.grad)
        held = np.zeros(seconds.shape, np.int64)
        if pays or copies:
            moved = sources[:, None] != want.layout
            held = np.where(moved | pays, self._local_bytes(value, want.layout), 0)
        if twice is not None:
            seconds = seconds + np.where(twice[:, None], forward, 0.0)
            held = np.where(twice[:, None], 0, held)
        return Table(seconds, held)

    def _stays(self, value: str, recomputed: Collection[str]) -> bool:
        """Whether the producer of `value` pays for it, if `recomputed` operators keep nothing."""
        savers = self._retention.savers
        return value in self._retention.at_producer and any(
            saver not in recomputed for saver in savers[value]
        )

    def _summed(self, value: str, sources: Ints, grads: Ints) -> Floats:
        """Seconds of a parameter's gradient: to where terms are summed each time, home once."""
        atoms, item = self.analysis.atoms[value], self._item_bytes(value)
        axes = len(self.mesh.axes)
        grad, to_grad = np.unique(grads, return_inverse=True)
        summed = summed_gradients(sources, grad, axes)
        each = self.measure.redistributions(
            atoms, item, np.tile(grad, len(sources)), summed.ravel()
        )
        home = np.repeat(duals(sources, axes), len(grad))
        once = self.measure.redistributions(atoms, item, summed.ravel(), home)
        return (each * self.micro_batches + once).reshape(summed.shape)[:, to_grad]

    def _matrix(self, value: str, sources: Ints, targets: Ints) -> Floats:
        """Seconds between all pairs of layouts: (S,), (T,) -> (S, T).

        Values of the same atoms and dtype share one matrix of all layouts that they may have.
        """
        atoms, item = self.analysis.atoms[value], self._item_bytes(value)
        priced = self.measure.redistributions
        if (atoms, item) not in self._matrices:
            few = np.zeros(0, np.int64)
            if most_layouts(atoms, self.mesh) <= _LAYOUTS_LISTED:
                known = np.sort(layouts_of(atoms, self.mesh))
                few = known if len(known) <= _LAYOUTS_AT_ONCE else few
            src, dst = np.repeat(few, len(few)), np.tile(few, len(few))
            seconds = priced(atoms, item, src, dst).reshape(len(few), len(few))
            self._matrices[atoms, item] = few, seconds
        known, seconds = self._matrices[atoms, item]
        if known.size:
            return seconds[np.ix_(np.searchsorted(known, sources), np.searchsorted(known, targets))]
        src, dst = np.repeat(sources, len(targets)), np.tile(targets, len(sources))
        return priced(atoms, item, src, dst).reshape(len(sources), len(targets))

    def _pays(self, value: str, op: Op) -> tuple[bool, bool]:
        edge = (value, op.name)
        return edge in self._retention.at_edge, edge in self._retention.copies

    def _local_bytes(self, value: str, codes: Ints) -> Ints:
        by_axis = digits(codes, len(self.mesh.axes))
        elements = local_elements(by_axis, self.analysis.atoms[value], self.mesh)
        return elements * self._item_bytes(value)

    def _item_bytes(self, value: str) -> int:
        return ITEM_BYTES[self.graph.tensor[value].dtype]

    def _workload(self, op: Op) -> Workload:
        if op.name not in self._workloads:
            rule = self.analysis.rules[op.name]
            self._workloads[op.name] = workload(op, rule, self.graph)
        return self._workloads[op.name]


def _key(codes: Ints) -> bytes:
    return codes.tobytes()


def _frozen(seconds: Floats, held: Ints) -> Table:
    """A table that nobody can write to, as it is shared."""
    seconds.flags.writeable = False
    held.flags.writeable = False
    return Table(seconds, held)
