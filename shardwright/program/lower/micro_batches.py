"""Lowers a step in micro-batches: one program for each, on each rank.

A micro-batch is an index along the outermost axis of the mesh (`rules/micro_batches.py`),
and its program what any rank of that mesh would run. Its outputs are terms of
sums over all micro-batches, and so are the gradients of parameters: the
runtime adds them up. By default a gradient is reduced over the devices before that only
where the parameter is stored sharded. Where it is stored whole the rank's own
terms, which are no larger, are added up first and reduced once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.ir.gradient_sync import EVERY, LAST
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
    local_atoms,
    shape_of,
)
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import (
    Instruction,
    Program,
    RecomputedSegment,
    Redistribute,
    flat,
    moves,
)
from shardwright.program.lower.rank_program import ProgramLayouts, input_layouts, write
from shardwright.program.lower.zigzag_order import in_zigzag_order
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches, extended, gradient_layout
from shardwright.rules.placements import OpLayouts
from shardwright.rules.rule import Tiling


@dataclass(frozen=True)
class MicroPrograms:
    """The programs of one rank in a step: `programs` one after the other, then `reductions`.

    A reduction brings the sum of a parameter's gradients (`value`, in the
    shape that the parameter is stored in) to where the parameter lies.
    """

    programs: tuple[Program, ...]
    reductions: tuple[Redistribute, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.programs, *self.reductions)))


@dataclass(frozen=True)
class GraphPart:
    """A part of a graph that is lowered by itself, such as a pipeline stage.

    Operators lie as `layouts_by_op`, on the mesh with the axis of micro-batches. The part is given
    the values `received`, in these layouts, and hands on those `sent` as they are made.
    """

    graph: Graph
    layouts_by_op: Mapping[str, OpLayouts]
    received: Mapping[str, Layout] = field(default_factory=dict)
    sent: Collection[str] = ()


def lower_micro(
    graph: Graph,
    analysis: Analysis,
    micro: MicroBatches,
    decisions: Decisions,
    rank: int,
    numbers: Sequence[int] | None = None,
) -> MicroPrograms:
    """The programs of `rank` of the devices; `decisions` are about those.

    Of the micro-batches with these `numbers`; None is all of them.
    """
    part = GraphPart(graph, micro_batch_layouts(graph, analysis, micro, decisions))
    return lower_part(part, analysis, micro, decisions, rank, numbers)


def micro_batch_layouts(
    graph: Graph, analysis: Analysis, micro: MicroBatches, decisions: Decisions
) -> Mapping[str, OpLayouts]:
    """Layouts of every operator on the mesh of `decisions` and the axis of micro-batches."""
    tilings = micro.tilings(decisions.tilings)
    found = {
        op.name: micro.op_layouts(analysis.rules[op.name], tilings[op.name], decisions.mesh)
        for op in graph.ops
    }
    return in_zigzag_order(graph, analysis, found)


def lower_part(
    part: GraphPart,
    analysis: Analysis,
    micro: MicroBatches,
    decisions: Decisions,
    rank: int,
    numbers: Sequence[int] | None = None,
) -> MicroPrograms:
    """The programs of `rank` for a part of the graph of `micro`.

    Of the micro-batches with these `numbers`; None is all of them.
    """
    graph, layouts_by_op = part.graph, part.layouts_by_op
    mesh, storage = decisions.mesh, decisions.storage
    wide = micro.mesh(mesh)
    given = {name: extended(layout, wide, REPLICATE) for name, layout in storage.items()}
    given.update(micro_inputs(graph, analysis, micro, mesh, decisions.tilings))
    given.update(part.received)
    sums = {
        leaf.name: _accumulated(
            graph, layouts_by_op, leaf.name, storage[leaf.name], decisions.gradient_sync
        )
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
        if graph.tensor[leaf.name].requires_grad
    }

    def home(value: str, layout: Layout) -> Layout:
        return extended(sums[value], wide, PARTIAL) if value in sums else gradient_layout(layout)

    term = extended(Layout.replicated(mesh), wide, PARTIAL)
    placed = ProgramLayouts(wide, layouts_by_op, given, term, frozenset(part.sent), home)
    programs = tuple(
        write(graph, analysis, placed, decisions, number * mesh.size + rank)
        for number in (range(micro.count) if numbers is None else numbers)
    )
    at = mesh.coordinate(rank)
    reductions = tuple(
        _reduction(analysis, leaf.name, sums[leaf.name], storage[leaf.name], at)
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
        if leaf.name in sums and sums[leaf.name] != storage[leaf.name]
    )
    return MicroPrograms(programs, reductions)


def micro_inputs(
    graph: Graph,
    analysis: Analysis,
    micro: MicroBatches,
    mesh: Mesh,
    tilings: Mapping[str, Tiling],
) -> dict[str, Layout]:
    """Layouts of the inputs on the mesh that `micro` extends."""
    return input_layouts(graph, analysis, micro.mesh(mesh), micro.tilings(tilings), in_turn=1)


def _accumulated(
    graph: Graph,
    layouts_by_op: Mapping[str, OpLayouts],
    name: str,
    stored: Layout,
    sync: str | None,
) -> Layout:
    """The layout of a parameter's gradient while its terms are added up.

    It is the layout of the parameter, except that it is Partial along axes on which the parameter
    is replicated and a reader produces a part of its gradient, and, if gradients are reduced only
    after the last micro-batch, along axes on which readers produce partial sums. Gradients that are
    reduced after every micro-batch have the layout of the parameter.
    """
    if sync == EVERY:
        return stored
    grads = [
        grad
        for op in graph.consumers[name]
        for operand, grad in zip(op.operands, layouts_by_op[op.name].operand_grads, strict=True)
        if operand == name
    ]
    found: list[Placement] = []
    for axis, placement in enumerate(stored.placements, start=1):
        along = [grad.placements[axis] for grad in grads]
        parts = any(not isinstance(one, Replicate) for one in along)
        whole = parts and not any(isinstance(one, Shard) for one in along)
        sharded = isinstance(placement, Shard) and not (sync == LAST and whole)
        found.append(placement if sharded or not parts else PARTIAL)
    return Layout(stored.mesh, tuple(found))


def _reduction(
    analysis: Analysis, name: str, summed: Layout, stored: Layout, at: tuple[int, ...]
) -> Redistribute:
    """The redistribution of a summed gradient to the layout of its parameter."""
    atoms = analysis.atoms[name]
    terms, tile = local_atoms(atoms, summed, at), local_atoms(atoms, stored, at)
    return Redistribute(
        value=name,
        result=f"{name}/gradient",
        text=f"gradient {summed} -> {stored}",
        before=shape_of(terms),
        after=shape_of(tile),
        atoms_before=flat(terms),
        atoms_grad=flat(tile),
        forward=moves(atoms, summed, stored, at),
        backward=(),
        differentiable=False,
    )


def flattened(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """All instructions, those that are recomputed together one by one."""
    for instruction in instructions:
        if isinstance(instruction, RecomputedSegment):
            yield from flattened(instruction.instructions)
        else:
            yield instruction
