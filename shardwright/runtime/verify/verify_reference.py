"""Replaces operators that differ by choice between one and many devices, for `verify`."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from shardwright.ir.graph import Graph, Op
from shardwright.ir.layout import atom_range
from shardwright.program.decisions import Decisions
from shardwright.program.lower.micro_batches import micro_batch_layouts
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import micro_batches, undivided_batch


def comparable(graph: Graph) -> Graph:
    """`graph`, widened, with the random numbers that one device and every plan have in common."""
    return replace(
        graph,
        numerics=replace(graph.numerics, rng="exact", precision="model", reduce="stored", fp8=""),
    )


def in_parts(graph: Graph, analysis: Analysis, decisions: Decisions) -> Graph:
    """`graph` for one device, whose local batch norms see the parts that the ranks have.

    In micro-batches that is the rank's part of one of them.
    """
    if not any(op.kind == "local_batch_norm" for op in graph.ops):
        return graph
    count, mesh = decisions.micro_batches, decisions.mesh
    micro = (
        undivided_batch(graph, analysis) if count == 1 else micro_batches(graph, analysis, count)
    )
    layouts_by_op, mesh = micro_batch_layouts(graph, analysis, micro, decisions), micro.mesh(mesh)

    def parts(op: Op) -> tuple[int, ...]:
        layout = layouts_by_op[op.name].operands[0]
        atoms = analysis.atoms[op.operands[0]][0]
        batch = torch.arange(prod(atoms)).view(atoms)
        number = torch.zeros_like(batch)
        for rank in range(mesh.size):
            tile, at = batch, mesh.coordinate(rank)
            for a, size in enumerate(atoms):
                local = atom_range(size, (0, a), layout, at)
                tile = tile.narrow(a, local.start, len(local))
            number.view(-1)[tile.flatten()] = int(tile.min())  # names the part
        return tuple(number.flatten().tolist())

    return replace(
        graph,
        ops=tuple(
            replace(op, args=(*op.args[:5], parts(op))) if op.kind == "local_batch_norm" else op
            for op in graph.ops
        ),
    )


def notes(graph: Graph) -> tuple[str, ...]:
    """Notes on what is compared instead of what the graph's numerics make incomparable."""
    found = []
    if graph.numerics.rng == "fast":
        found.append(
            "rng='fast' draws other numbers under every plan, so they are not compared; both sides"
            " dropped out the same elements here, those of rng='exact'"
        )
    if graph.numerics.is_mixed:
        found.append(
            f"precision={graph.numerics.precision!r} rounds sums, in another order under every"
            " plan, so both sides computed in float64 here"
        )
    if graph.numerics.fp8:
        found.append(
            f"fp8={graph.numerics.fp8} rounds products to 8 bits, with scales of each rank's tiles,"
            " so both sides multiplied in float64 here"
        )
    if graph.numerics.batch_norm == "local":
        found.append(
            "batch_norm='local' is not what one device computes on the whole batch; the plan was"
            " compared with one device whose batch norms see the same parts of the batch"
        )
    return tuple(found)
