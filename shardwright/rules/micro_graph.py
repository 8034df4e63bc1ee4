"""A graph and its analysis at the sizes of one micro-batch.

Costs do not depend on values, so one micro-batch costs as much as the graph with the size of the
longest micro-batch as its batch size.
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

    Factors also store the size in the shortest micro-batch (`Factor.least`), so that tilings that
    leave a device an empty tile of it are excluded. Operators that compute the whole batch in every
    micro-batch keep their sizes, and devices do not split their batch.
    """
    if micro.count == 1:
        return graph, analysis
    atoms = {
        name: _micro_atoms(sizes, micro.placements[name], micro.count)
        for name, sizes in analysis.atoms.items()
    }
    rules: dict[tuple[int, object], Rule] = {}  # equal rules stay one object
    for op in graph.ops:
        key = id(analysis.rules[op.name]), micro.choices[op.name]
        if key not in rules:
            rules[key] = _micro_rule(analysis.rules[op.name], micro, op)
    small = replace(
        analysis,
        atoms=atoms,
        rules={
            op.name: rules[id(analysis.rules[op.name]), micro.choices[op.name]] for op in graph.ops
        },
    )
    values = tuple(replace(value, shape=shape_of(atoms[value.name])) for value in graph.values)
    tensor = {value.name: value for value in values}
    ops = tuple(_scale_extra_saved(op, graph.tensor, tensor) for op in graph.ops)
    return replace(graph, values=values, ops=ops), small


def _micro_atoms(atoms: Atoms, placement: Placement, count: int) -> Atoms:
    if not isinstance(placement, Shard):
        return atoms
    return tuple(
        tuple(
            chunk(size, count, 0)[1] if (d, a) == (placement.dim, placement.atom) else size
            for a, size in enumerate(sizes)
        )
        for d, sizes in enumerate(atoms)
    )


def _micro_rule(rule: Rule, micro: MicroBatches, op: Op) -> Rule:
    choice = micro.choices[op.name]

    def factor(one: Factor) -> Factor:
        if isinstance(choice, Split) and one.name == choice.factor:
            longest, shortest = (chunk(one.size, micro.count, i)[1] for i in (0, micro.count - 1))
            return replace(one, size=longest, least=shortest)
        if choice is None and one.atom == micro.atom:
            return replace(one, kind=FactorKind.WHOLE)
        return one

    return replace(rule, factors=tuple(factor(one) for one in rule.factors))


def _scale_extra_saved(op: Op, before: dict[str, Tensor], after: dict[str, Tensor]) -> Op:
    """`op` with `extra_saved` and `extra_rows` scaled in proportion to its first result."""
    if not op.extra_saved or not op.outputs:
        return op
    name = extra_scales_with(op, before)
    whole, part = before[name].num_elements, after[name].num_elements
    if whole == part:
        return op
    saved, rows = (-(-extra * part // whole) for extra in (op.extra_saved, op.extra_rows))
    return replace(op, extra_saved=saved, extra_rows=rows)
