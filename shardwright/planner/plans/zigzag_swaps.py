"""Lists what devices exchange to compute in zigzag order, which tables of operators do not price.

Which operators compute in that order depends on all operators of a plan
(`program/lower/zigzag_order.py`). Mostly tokens, positions and labels are reordered alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.layout import (
    Bytes,
    Layout,
    Mesh,
    Seconds,
    largest_atoms,
    num_elements,
)
from shardwright.ir.plan import Phase, PlannedOp, PlannedTransfer
from shardwright.ir.redistribution import SWAPS, PlacementChange, steps_between
from shardwright.machine.topology import links
from shardwright.planner.tables.model import CostModel
from shardwright.program.lower.rank_program import op_layouts_of
from shardwright.program.lower.zigzag_order import LayoutsByOp
from shardwright.rules.analysis import expand_analysis
from shardwright.rules.placements import parse_tiling
from shardwright.simulate.costs.collectives import step_price


def zigzag_swaps(
    graph: Graph, stands_for: Mapping[str, str], model: CostModel, ops: Sequence[PlannedOp]
) -> list[PlannedTransfer]:
    """The exchanges of a plan of `graph` with these `ops`.

    `model` is of the graph without its repeated layers, of whose names `stands_for` has those that
    others stand for.
    """
    if not any("z" in word.split("~") for op in ops for word in op.tiling if "~" in word):
        return []
    analysis = expand_analysis(model.analysis, graph, stands_for)
    planned = {op.name: op for op in ops}
    tilings = {name: parse_tiling(analysis.rules[name], planned[name].tiling) for name in graph.op}
    layouts_by_op = op_layouts_of(graph, analysis, model.mesh, tilings)
    joined = links(model.machine, model.mesh)
    found: list[PlannedTransfer] = []
    for value, consumer, phase, step in _swaps(graph, layouts_by_op, planned):
        cut = _made(graph, layouts_by_op, value) or _only(model.mesh, step)
        elements = num_elements(largest_atoms(analysis.atoms[value], cut))
        size = elements * ITEM_BYTES[graph.tensor[value].dtype]
        price = step_price(step.collective, joined[step.axis], model.machine)
        words = (f"{step.collective.value} {model.mesh.names[step.axis]}",)
        times = model.micro_batches
        seconds = Seconds(times * price.seconds(size, size))
        found.append(PlannedTransfer(value, consumer, phase, words, Bytes(size), seconds, times))
    return found


def _swaps(
    graph: Graph, layouts_by_op: LayoutsByOp, planned: dict[str, PlannedOp]
) -> Iterator[tuple[str, str, Phase, PlacementChange]]:
    """Every value that is reordered, its reader, when, and along which axis."""
    moved: set[tuple[str, Layout, Layout, int]] = set()
    for op in graph.ops:
        op_layouts, segment = layouts_by_op[op.name], planned[op.name].segment
        reads = zip(op.operands, op_layouts.operands, op_layouts.operand_grads, strict=True)
        for value, wanted, grad in reads:
            source = _made(graph, layouts_by_op, value) or wanted.contiguous
            if (value, wanted, grad, segment) in moved:
                continue
            moved.add((value, wanted, grad, segment))
            forward = [Phase.FORWARD, *([Phase.RECOMPUTE] if segment else [])]
            for step in _of_order(source, wanted):
                yield from ((value, op.name, phase, step) for phase in forward)
            if graph.tensor[value].requires_grad:
                for step in _of_order(grad, source.dual()):
                    yield value, op.name, Phase.BACKWARD, step
    for value in graph.outputs:
        made = _made(graph, layouts_by_op, value)
        if made is not None:
            for step in _of_order(made, Layout.replicated(made.mesh)):
                yield value, "", Phase.FORWARD, step


def _of_order(source: Layout, wanted: Layout) -> Iterator[PlacementChange]:
    return (step for step in steps_between(source, wanted) if step.collective in SWAPS)


def _made(graph: Graph, layouts_by_op: LayoutsByOp, value: str) -> Layout | None:
    """The layout of a result; None for leaves, which come as their readers need them."""
    maker = graph.producer.get(value)
    if maker is None:
        return None
    return layouts_by_op[maker.name].results[maker.outputs.index(value)]


def _only(mesh: Mesh, step: PlacementChange) -> Layout:
    """A layout that is cut as `step` says, along its axis alone."""
    whole = Layout.replicated(mesh).placements
    return Layout(mesh, (*whole[: step.axis], step.src, *whole[step.axis + 1 :]))
