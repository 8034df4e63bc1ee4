"""Micro-batches: data parallelism along time instead of devices.

A step that takes its batch in pieces, one after the other, and adds up the
gradients is data parallel along one more mesh axis, `mb`, the outermost. On it
every value is whole, a piece, or a term of a sum, as on any other axis, but
nothing can be communicated: the next piece has not been computed yet. What
costs nothing is allowed, and goes one way: Replicate -> Shard -> Partial.

Gradients are the mirror image. All pieces add to them, so the gradient of a
whole value is a term, that of a term is whole, and that of a piece is its
piece; where an operator computes all of a value for every piece, its backward,
being linear, takes terms and gives terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from shardwright.rules.placements import Placing, place
from shardwright.rules.rule import Choice, FactorKind, PassPartial, Rule, Split, Tiling

AXIS = "mb"


class MicroBatchError(ValueError):
    """A step that cannot take its batch in so many pieces; the message says why."""


@dataclass(frozen=True)
class MicroBatches:
    """How a graph takes its batch in `count` pieces.

    `choices` is what every operator does along the axis and `placements` how
    every value lies on it; `atom` is the batch, by its id in `Analysis.dims`.
    """

    count: int
    atom: int
    choices: Mapping[str, Choice]
    placements: Mapping[str, Placement]

    def mesh(self, devices: Mesh) -> Mesh:
        """`devices` with the axis of the pieces outermost: their tiles are tiles of a piece."""
        return Mesh(((AXIS, self.count), *devices.axes))

    def tilings(self, on_devices: Mapping[str, Tiling]) -> dict[str, Tiling]:
        """Tilings on the extended mesh, those on the devices given."""
        return {name: (self.choices[name], *tiling) for name, tiling in on_devices.items()}

    def place(self, rule: Rule, tiling: Tiling, devices: Mesh) -> Placing:
        """Layouts of an operator under a tiling on the extended mesh."""
        placing = place(rule, tiling, self.mesh(devices))
        grads = tuple(
            _with_outer(_mirrored(layout.placements[0]), grad)
            for layout, grad in zip(placing.operands, placing.operand_grads, strict=True)
        )
        return replace(placing, operand_grads=grads)


def extended(layout: Layout, mesh: Mesh, placement: Placement) -> Layout:
    """`layout` on the extended `mesh`, with `placement` along the axis of micro-batches."""
    return Layout(mesh, (placement, *layout.placements))


def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a value is wanted that lies as `layout` on an extended mesh."""
    return _with_outer(_mirrored(layout.placements[0]), layout.dual())


def _with_outer(placement: Placement, layout: Layout) -> Layout:
    return Layout(layout.mesh, (placement, *layout.placements[1:]))


def _mirrored(placement: Placement) -> Placement:
    if isinstance(placement, Shard):
        return placement
    return PARTIAL if isinstance(placement, Replicate) else REPLICATE


def micro_batches(graph: Graph, analysis: Analysis, count: int) -> MicroBatches:
    """How `graph` takes its batch in `count` pieces whose losses and gradients add up to its own.

    The batch is the leading dimension of the inputs. Raises `MicroBatchError`
    where it cannot be cut so, or where the loss is no sum over samples: an
    operator needs the whole batch of what depends on parameters, as a batch
    norm does for its statistics.
    """
    atom, size = _batch(graph, analysis)
    require_pieces(size, count)
    chooser = _Chooser(graph, analysis, atom)
    choices, placements = chooser.choose()
    (loss,) = graph.outputs
    if not isinstance(placements[loss], Partial):
        raise MicroBatchError("the loss is no sum over the samples of the batch")
    return MicroBatches(count, atom, choices, placements)


def batch_size(graph: Graph, analysis: Analysis) -> int:
    """Samples in the batch; raises `MicroBatchError` for a graph that has none."""
    return _batch(graph, analysis)[1]


def recounted(found: MicroBatches, graph: Graph, analysis: Analysis, count: int) -> MicroBatches:
    """`count` pieces of what `found` has pieces of: what is cut does not depend on their number.

    Raises `MicroBatchError` where there cannot be so many.
    """
    require_pieces(batch_size(graph, analysis), count)
    return replace(found, count=count)


def require_pieces(size: int, count: int) -> None:
    """Raise `MicroBatchError` where a batch of `size` has no `count` pieces with a sample each."""
    if count < 1 or count > size or chunk(size, count, count - 1)[1] == 0:
        raise MicroBatchError(
            f"a batch of {size} cannot be cut into {count} micro-batches, none of them empty"
        )


def one_batch(graph: Graph, analysis: Analysis) -> MicroBatches:
    """The whole batch as the only piece: any graph can take it so."""
    placements: dict[str, Placement] = {value.name: REPLICATE for value in graph.values}
    return MicroBatches(1, -1, {op.name: None for op in graph.ops}, placements)


def _batch(graph: Graph, analysis: Analysis) -> tuple[int, int]:
    """The atom that leads most inputs, and its size."""
    returned = [graph.tensor[name] for name in graph.outputs]
    if len(returned) != 1 or returned[0].shape or not returned[0].requires_grad:
        raise MicroBatchError("only a model that returns its loss can take its batch in pieces")
    sizes: dict[int, int] = {}
    votes: dict[int, int] = {}
    for leaf in graph.leaves_of(LeafKind.INPUT):
        dims, atoms = analysis.dims[leaf.name], analysis.atoms[leaf.name]
        if dims and dims[0]:
            sizes[dims[0][0]] = atoms[0][0]
            votes[dims[0][0]] = votes.get(dims[0][0], 0) + 1
    if not votes:
        raise MicroBatchError("no input has a batch of more than one sample")
    best = max(votes, key=lambda atom: votes[atom])  # the first of equals
    return best, sizes[best]


class _Chooser:
    """Splits the batch wherever nothing has to be communicated.

    Where an operator needs the whole of a value that depends on inputs alone
    (how many labels count), that value is computed whole for every piece, and
    so is what it is made of.
    """

    def __init__(self, graph: Graph, analysis: Analysis, atom: int) -> None:
        self.graph = graph
        self.analysis = analysis
        self.atom = atom
        self.whole: set[str] = set()  # operators that compute everything
        self.trained = _descendants(graph, LeafKind.PARAMETER) & _descendants(graph, LeafKind.INPUT)

    def choose(self) -> tuple[dict[str, Choice], dict[str, Placement]]:
        while True:
            before = len(self.whole)
            choices: dict[str, Choice] = {}
            placements: dict[str, Placement] = {leaf.name: REPLICATE for leaf in self.graph.leaves}
            for op in self.graph.ops:
                choices[op.name] = choice = self._choice(op, placements)
                placed = self.analysis.rules[op.name].placed(choice)
                placements.update(zip(op.outputs, placed.results, strict=True))
            if len(self.whole) == before:
                return choices, placements

    def _choice(self, op: Op, placements: Mapping[str, Placement]) -> Choice:
        rule = self.analysis.rules[op.name]
        candidates = [None] if op.name in self.whole else list(self._candidates(op, placements))
        lacking: list[str] = []
        for choice in candidates:
            wanted = rule.placed(choice).operands
            lacking = [
                name
                for name, want in zip(op.operands, wanted, strict=True)
                if not _free(placements[name], want)
            ]
            if not any(name in self.trained for name in lacking):
                break
        self._make_whole(lacking, op)
        return choice

    def _candidates(self, op: Op, placements: Mapping[str, Placement]) -> Iterator[Choice]:
        rule = self.analysis.rules[op.name]
        for factor in rule.factors:
            if factor.atom == self.atom and factor.kind is FactorKind.PARALLEL:
                choice = Split(factor.name)
                # Pieces cannot agree on what is inside of an operator.
                if not any(isinstance(p, Partial) for p in rule.placed(choice).agreed):
                    yield choice
        if any(isinstance(placements[name], Partial) for name in op.operands):
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


def _free(have: Placement, want: Placement) -> bool:
    """Whether what lies as `have` can be read as `want` without what other pieces hold."""
    order = (Replicate, Shard, Partial)
    return have == want or order.index(type(have)) < order.index(type(want))


def _descendants(graph: Graph, kind: LeafKind) -> set[str]:
    """All values that depend on a leaf of `kind`."""
    found = {leaf.name for leaf in graph.leaves_of(kind)}
    for op in graph.ops:
        if any(name in found for name in op.operands):
            found.update(op.outputs)
    return found
