"""A graph and its analysis at the sizes of one micro-batch.

Costs do not depend on values. What one micro-batch costs is what the graph
costs in which the batch is as long as the longest piece.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Graph, Op, Tensor, extra_scales_with
from shardwright.ir.layout import Atoms, Placement, Shard, chunk, shape_of
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import MicroBatches
from shardwright.rules.rule import Factor, FactorKind, Rule, Split


def micro_graph(graph: Graph, analysis: Analysis, micro: MicroBatches) -> tuple[Graph, Analysis]:
    """`graph` and `analysis` at the sizes of the longest micro-batch.

    Factors remember the shortest, so that no tiling leaves a device an empty
    tile of it. What is computed whole for every piece keeps its sizes, and its
    batch stays whole on the devices too: a tile of a tile is not cut from there.
    """
    if micro.count == 1:
        return graph, analysis
    atoms = {
        name: _cut(sizes, micro.placements[name], micro.count)
        for name, sizes in analysis.atoms.items()
    }
    rules: dict[tuple[int, object], Rule] = {}  # equal rules stay one object
    for op in graph.ops:
        key = id(analysis.rules[op.name]), micro.choices[op.name]
        if key not in rules:
            rules[key] = _piece(analysis.rules[op.name], micro, op)
    small = replace(
        analysis,
        atoms=atoms,
        rules={
            op.name: rules[id(analysis.rules[op.name]), micro.choices[op.name]] for op in graph.ops
        },
    )
    values = tuple(replace(value, shape=shape_of(atoms[value.name])) for value in graph.values)
    tensor = {value.name: value for value in values}
    ops = tuple(_extra(op, graph.tensor, tensor) for op in graph.ops)
    return replace(graph, values=values, ops=ops), small


def _cut(atoms: Atoms, placement: Placement, count: int) -> Atoms:
    if not isinstance(placement, Shard):
        return atoms
    return tuple(
        tuple(
            chunk(size, count, 0)[1] if (d, a) == (placement.dim, placement.atom) else size
            for a, size in enumerate(sizes)
        )
        for d, sizes in enumerate(atoms)
    )


def _piece(rule: Rule, micro: MicroBatches, op: Op) -> Rule:
    choice = micro.choices[op.name]

    def factor(one: Factor) -> Factor:
        if isinstance(choice, Split) and one.name == choice.factor:
            longest, shortest = (chunk(one.size, micro.count, i)[1] for i in (0, micro.count - 1))
            return replace(one, size=longest, least=shortest)
        if choice is None and one.atom == micro.atom:
            return replace(one, kind=FactorKind.WHOLE)
        return one

    return replace(rule, factors=tuple(factor(one) for one in rule.factors))


def _extra(op: Op, before: dict[str, Tensor], after: dict[str, Tensor]) -> Op:
    """What autograd keeps besides is as much less as what it scales with."""
    if not op.extra_saved or not op.outputs:
        return op
    name = extra_scales_with(op, before)
    whole, piece = before[name].num_elements, after[name].num_elements
    if whole == piece:
        return op
    saved, rows = (-(-extra * piece // whole) for extra in (op.extra_saved, op.extra_rows))
    return replace(op, extra_saved=saved, extra_rows=rows)
