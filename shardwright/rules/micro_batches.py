"""Micro-batches: data parallelism along time instead of devices.

A step that computes its micro-batches one after the other and accumulates the gradients is data
parallel along an additional, outermost mesh axis `mb`. Values have placements on it as on any other
axis, but nothing can be communicated along it, because later micro-batches are not computed yet.
Only changes of placement without communication are allowed: Replicate -> Shard -> Partial.

Gradients are accumulated over micro-batches, so along `mb` the gradient of a Replicate value is
Partial, that of a Partial value is Replicate, and that of a Shard is the same Shard. The backward
pass of an operator that is replicated along `mb` is linear, so it maps Partial gradients to Partial
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
)
from shardwright.rules.analysis import Analysis
from shardwright.rules.placements import OpLayouts, layouts_under
from shardwright.rules.rule import Choice, FactorKind, PassPartial, Rule, Split, Tiling

AXIS = "mb"


class MicroBatchError(ValueError):
    """A step that cannot be split into so many micro-batches; the message says why."""


@dataclass(frozen=True)
class MicroBatches:
    """The split of a graph into `count` micro-batches.

    `choices` has the choice of every operator and `placements` the placement of
    every value along the axis `mb`; `atom` is the id of the batch in `Analysis.dims`.
    """

    count: int
    atom: int
    choices: Mapping[str, Choice]
    placements: Mapping[str, Placement]

    def mesh(self, devices: Mesh) -> Mesh:
        """`devices` with the axis `mb` outermost, so that devices split each micro-batch."""
        return Mesh(((AXIS, self.count), *devices.axes))

    def tilings(self, on_devices: Mapping[str, Tiling]) -> dict[str, Tiling]:
        """Tilings on the extended mesh, from those on the devices."""
        return {name: (self.choices[name], *tiling) for name, tiling in on_devices.items()}

    def op_layouts(self, rule: Rule, tiling: Tiling, devices: Mesh) -> OpLayouts:
        """Layouts of an operator under a tiling on the extended mesh."""
        op_layouts = layouts_under(rule, tiling, self.mesh(devices))
        grads = tuple(
            _with_outer(_gradient_placement(layout.placements[0]), grad)
            for layout, grad in zip(op_layouts.operands, op_layouts.operand_grads, strict=True)
        )
        return replace(op_layouts, operand_grads=grads)


SplitBatch = Callable[[int], MicroBatches]  # the split into so many; callers keep those made


def extended(layout: Layout, mesh: Mesh, placement: Placement) -> Layout:
    """`layout` on the extended `mesh`, with `placement` along `mb`."""
    return Layout(mesh, (placement, *layout.placements))


def gradient_layout(layout: Layout) -> Layout:
    """The layout of a value's gradient on an extended mesh, given the layout of the value."""
    return _with_outer(_gradient_placement(layout.placements[0]), layout.dual())


def _with_outer(placement: Placement, layout: Layout) -> Layout:
    return Layout(layout.mesh, (placement, *layout.placements[1:]))


def _gradient_placement(placement: Placement) -> Placement:
    if isinstance(placement, Shard):
        return placement
    return PARTIAL if isinstance(placement, Replicate) else REPLICATE


def micro_batches(graph: Graph, analysis: Analysis, count: int) -> MicroBatches:
    """Split `graph` into `count` micro-batches whose losses and gradients add up to its own.

    The batch is the leading dimension of the inputs. Raises `MicroBatchError` if it cannot be split
    into `count` parts, or if the loss is not a sum over samples because an operator reduces values
    that depend on parameters over the whole batch, e.g. the statistics of a batch norm.
    """
    atom, size = _batch(graph, analysis)
    check_micro_batch_count(size, count)
    chooser = _Chooser(graph, analysis, atom)
    choices, placements = chooser.choose()
    (loss,) = graph.outputs
    if not isinstance(placements[loss], Partial):
        raise MicroBatchError(
            f"the loss is no sum over the samples of the batch{chooser.undivided(choices)}"
        )
    return MicroBatches(count, atom, choices, placements)


def batch_size(graph: Graph, analysis: Analysis) -> int:
    """Samples in the batch; raises `MicroBatchError` for a graph that has none."""
    return _batch(graph, analysis)[1]


def with_count(found: MicroBatches, graph: Graph, analysis: Analysis, count: int) -> MicroBatches:
    """`found` with another number of micro-batches; choices and placements do not depend on it.

    Raises `MicroBatchError` if the batch is too small for `count`.
    """
    check_micro_batch_count(batch_size(graph, analysis), count)
    return replace(found, count=count)


def check_micro_batch_count(size: int, count: int) -> None:
    """Raise `MicroBatchError` unless `count` micro-batches of a batch of `size` are non-empty."""
    if count < 1 or count > size or chunk(size, count, count - 1)[1] == 0:
        raise MicroBatchError(
            f"a batch of {size} cannot be cut into {count} micro-batches, none of them empty"
        )


def undivided_batch(graph: Graph, analysis: Analysis) -> MicroBatches:
    """The whole batch as the only micro-batch, which every graph supports."""
    placements: dict[str, Placement] = {value.name: REPLICATE for value in graph.values}
    return MicroBatches(1, -1, {op.name: None for op in graph.ops}, placements)


def _batch(graph: Graph, analysis: Analysis) -> tuple[int, int]:
    """The batch: the atom that is the leading dimension of most inputs, and its size."""
    returned = [graph.tensor[name] for name in graph.outputs]
    if len(returned) != 1 or returned[0].shape or not returned[0].requires_grad:
        raise MicroBatchError(
            "micro-batches need a model that returns one scalar loss, and nothing else"
        )
    sizes: dict[int, int] = {}
    votes: dict[int, int] = {}
    for leaf in graph.leaves_of(LeafKind.INPUT):
        dims, atoms = analysis.dims[leaf.name], analysis.atoms[leaf.name]
        if dims and dims[0]:
            sizes[dims[0][0]] = atoms[0][0]
            votes[dims[0][0]] = votes.get(dims[0][0], 0) + 1
    if not votes:
        raise MicroBatchError("no input has a batch of more than one sample")
    best = max(votes, key=lambda atom: votes[atom])  # `max` returns the first of equals
    return best, sizes[best]


class _Chooser:
    """Splits the batch in every operator in which that needs no communication.

    If an operator needs a reduced value that depends only on inputs (e.g. the number of labels),
    that value and its operands are computed for the whole batch in every micro-batch.
    """

    def __init__(self, graph: Graph, analysis: Analysis, atom: int) -> None:
        self.graph = graph
        self.analysis = analysis
        self.atom = atom
        self.whole: set[str] = set()  # operators that compute the whole batch every time
        self._known: dict[object, tuple[Choice, list[int]]] = {}
        self.trained = _descendants(graph, LeafKind.PARAMETER) & _descendants(graph, LeafKind.INPUT)

    def choose(self) -> tuple[dict[str, Choice], dict[str, Placement]]:
        while True:
            before = len(self.whole)
            choices: dict[str, Choice] = {}
            placements: dict[str, Placement] = {leaf.name: REPLICATE for leaf in self.graph.leaves}
            for op in self.graph.ops:
                choices[op.name] = choice = self._choice(op, placements)
                axis_placements = self.analysis.rules[op.name].axis_placements(choice)
                placements.update(zip(op.outputs, axis_placements.results, strict=True))
            if len(self.whole) == before:
                return choices, placements

    def undivided(self, choices: Mapping[str, Choice]) -> str:
        """The end of a message: the first operator of the loss that needs the whole batch."""
        needed = {*self.graph.outputs}
        for op in reversed(self.graph.ops):
            if needed & {*op.outputs}:
                needed |= {*op.operands}
        for op in self.graph.ops:
            if choices[op.name] is not None or op.name in self.whole or not needed & {*op.outputs}:
                continue
            if op.kind.startswith("new_") or op.kind.endswith("_like"):
                continue  # reads sizes only
            read = [name for name in op.operands if self._has_batch(name)]
            if read and not any(map(self._has_batch, op.outputs)):
                return f": {op.kind} in {op.source} needs the whole batch of %{read[0]}"
        return ""

    def _has_batch(self, name: str) -> bool:
        return any(self.atom in atoms for atoms in self.analysis.dims[name])

    def _choice(self, op: Op, placements: Mapping[str, Placement]) -> Choice:
        rule = self.analysis.rules[op.name]
        whole = op.name in self.whole
        given = tuple(placements[name] for name in op.operands)
        trained = tuple(name in self.trained for name in op.operands)
        key = id(rule), whole, given, trained
        if key not in self._known:  # asked again while `whole` grows
            self._known[key] = self._first_of(rule, given, trained, whole=whole)
        choice, lacking = self._known[key]
        self._make_whole([op.operands[place] for place in lacking], op)
        return choice

    def _first_of(
        self, rule: Rule, given: Sequence[Placement], trained: Sequence[bool], *, whole: bool
    ) -> tuple[Choice, list[int]]:
        """The first choice without missing operands that depend on parameters, or the last choice.

        Also returns the positions of the operands that would have to be communicated for it.
        """
        choice: Choice = None
        lacking: list[int] = []
        for choice in [None] if whole else self._candidates(rule, given):
            wanted = rule.axis_placements(choice).operands
            lacking = [
                place
                for place, (have, want) in enumerate(zip(given, wanted, strict=True))
                if not _needs_no_communication(have, want)
            ]
            if not any(trained[place] for place in lacking):
                break
        return choice, lacking

    def _candidates(self, rule: Rule, given: Sequence[Placement]) -> Iterator[Choice]:
        for factor in rule.factors:
            if factor.atom == self.atom and factor.kind is FactorKind.PARALLEL:
                choice = Split(factor.name)
                # A reduction inside an operator cannot span several micro-batches.
                internal = rule.axis_placements(choice).internal_reductions
                if not any(isinstance(p, Partial) for p in internal):
                    yield choice
        if any(isinstance(placement, Partial) for placement in given):
            yield from (PassPartial(term) for term in range(len(rule.linear)))
        yield None

    def _make_whole(self, values: list[str], reader: Op) -> None:
        for name in values:
            if name in self.trained:
                raise MicroBatchError(
                    f"{reader.kind} in {reader.source} needs the whole batch of %{name}, which"
                    " depends on parameters"
                )
            self.whole.add(self.graph.producer[name].name)


def _needs_no_communication(have: Placement, want: Placement) -> bool:
    """Whether a value placed as `have` can be read as `want` within one micro-batch."""
    order = (Replicate, Shard, Partial)
    return have == want or order.index(type(have)) < order.index(type(want))


def _descendants(graph: Graph, kind: LeafKind) -> set[str]:
    """All values that depend on a leaf of `kind`."""
    found = {leaf.name for leaf in graph.leaves_of(kind)}
    for op in graph.ops:
        if any(name in found for name in op.operands):
            found.update(op.outputs)
    return found
