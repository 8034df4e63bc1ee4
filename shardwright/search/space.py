"""The space of plans on one mesh, as a search problem: what every operator and parameter may do.

A node is an operator with its feasible tilings, or a parameter with its
possible storage layouts; an edge is a value that one writes and the other
reads. Storage sharded over devices (ZeRO, FSDP) is nothing special: a
parameter stored as a Shard and read as Replicate pays its gather on the edge,
and its gradient the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from shardwright.cost.collectives import redistribution_seconds
from shardwright.cost.model import CostModel
from shardwright.ir.graph import ITEM_BYTES, Graph, Leaf, LeafKind, Op
from shardwright.ir.layout import REPLICATE, Atoms, Layout, Mesh, Placement, Shard, fits
from shardwright.rules.placing import Placing, tilings
from shardwright.rules.rule import Rule, Tiling
from shardwright.search.problem import Assignment, Edge, Node, Problem


@dataclass(frozen=True)
class Space:
    """A problem and what its choices mean: choice k of node i is `options[i][k]`.

    Operators come first, in the graph's order, then parameters.
    """

    model: CostModel
    ops: tuple[Op, ...]
    parameters: tuple[Leaf, ...]
    op_options: tuple[tuple[tuple[Tiling, Placing], ...], ...]
    storage_options: tuple[tuple[Layout, ...], ...]
    problem: Problem

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Node of every operator and parameter, by name."""
        names = [op.name for op in self.ops] + [leaf.name for leaf in self.parameters]
        return {name: i for i, name in enumerate(names)}

    def tilings(self, choice: Assignment) -> dict[str, Tiling]:
        """Tiling of every operator under an assignment."""
        return {
            op.name: options[k][0]
            for op, options, k in zip(self.ops, self.op_options, choice, strict=False)
        }

    def storage(self, choice: Assignment) -> dict[str, Layout]:
        """Storage layout of every parameter under an assignment."""
        mine = choice[len(self.ops) :]
        return {
            leaf.name: options[k]
            for leaf, options, k in zip(self.parameters, self.storage_options, mine, strict=True)
        }

    def assignment(
        self, tilings: Mapping[str, Tiling], storage: Mapping[str, Layout]
    ) -> Assignment:
        """The choices that mean these; raises `KeyError` if one is infeasible."""
        found = []
        for op, options in zip(self.ops, self.op_options, strict=True):
            at = {tiling: k for k, (tiling, _) in enumerate(options)}
            found.append(at[tilings[op.name]])
        for leaf, layouts in zip(self.parameters, self.storage_options, strict=True):
            found.append({layout: k for k, layout in enumerate(layouts)}[storage[leaf.name]])
        return tuple(found)


def make_space(model: CostModel) -> Space:
    """Every feasible tiling and storage of the model's graph on its mesh, with their costs."""
    graph, mesh, rules = model.graph, model.mesh, model.analysis.rules
    known: dict[Rule, tuple[tuple[Tiling, Placing], ...]] = {}
    op_options = []
    for op in graph.ops:
        rule = rules[op.name]
        if rule not in known:
            known[rule] = tuple(tilings(rule, mesh))
        op_options.append(known[rule])
    parameters = graph.leaves_of(LeafKind.PARAMETER)
    layouts: dict[Atoms, tuple[Layout, ...]] = {}
    for leaf in parameters:
        atoms = model.analysis.atoms[leaf.name]
        if atoms not in layouts:
            layouts[atoms] = tuple(storage_layouts(atoms, mesh))
    storage_options = tuple(layouts[model.analysis.atoms[leaf.name]] for leaf in parameters)
    problem = _problem(model, parameters, op_options, storage_options)
    return Space(model, graph.ops, parameters, tuple(op_options), storage_options, problem)


def storage_layouts(atoms: Atoms, mesh: Mesh) -> list[Layout]:
    """How a parameter may be stored: along each axis replicated, or one of its atoms sharded."""
    shards = [Shard(d, a) for d, sizes in enumerate(atoms) for a in range(len(sizes))]
    per_axis: list[list[Placement]] = [
        [REPLICATE, *shards] if size > 1 else [REPLICATE] for size in mesh.shape
    ]
    layouts = (Layout(mesh, placements) for placements in product(*per_axis))
    return [layout for layout in layouts if fits(atoms, layout)]


def _problem(
    model: CostModel,
    parameters: tuple[Leaf, ...],
    op_options: list[tuple[tuple[Tiling, Placing], ...]],
    storage_options: tuple[tuple[Layout, ...], ...],
) -> Problem:
    graph = model.graph
    nodes, edges = [], []
    written: dict[str, tuple[int, list[Layout]]] = {}  # value -> (node, its layout per choice)
    for i, (leaf, stored) in enumerate(zip(parameters, storage_options, strict=True)):
        written[leaf.name] = (len(graph.ops) + i, list(stored))
    for i, (op, options) in enumerate(zip(graph.ops, op_options, strict=True)):
        choices = [tiling for tiling, _ in options]
        seconds, held = model.operator(op, choices)
        for value in dict.fromkeys(op.operands):
            positions = [k for k, name in enumerate(op.operands) if name == value]
            if value in written:
                node, layouts = written[value]
                table = model.edge(value, layouts, op, positions, choices)
                edges.append(Edge(node, i, table.seconds, table.bytes))
            else:  # inputs, buffers and constants lie whole on every device
                whole = [Layout.replicated(model.mesh)]
                table = model.edge(value, whole, op, positions, choices)
                seconds, held = seconds + table.seconds[0], held + table.bytes[0]
        for k, value in enumerate(op.outputs):
            layouts = [placing.results[k] for _, placing in options]
            written[value] = (i, layouts)
            if value in _returned(graph):
                seconds = seconds + _to_whole(model, value, layouts)
        nodes.append(Node(op.name, seconds, held))
    for leaf, stored in zip(parameters, storage_options, strict=True):
        table = model.parameter(leaf, stored)
        nodes.append(Node(leaf.name, table.seconds, table.bytes))
    return Problem(tuple(nodes), tuple(edges))


def _returned(graph: Graph) -> set[str]:
    return {*graph.outputs, *(value for _, value in graph.updates)}


def _to_whole(model: CostModel, value: str, layouts: list[Layout]) -> np.ndarray:
    """Seconds to bring a returned value to every device."""
    atoms = model.analysis.atoms[value]
    item = ITEM_BYTES[model.graph.tensor[value].dtype]
    whole = Layout.replicated(model.mesh)
    price = {
        layout: redistribution_seconds(atoms, item, layout, whole, model.machine)
        for layout in set(layouts)
    }
    return np.array([price[layout] for layout in layouts])
