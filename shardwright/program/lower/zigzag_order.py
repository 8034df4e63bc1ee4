"""Decides which operators compute in zigzag order, for causal attention over a split sequence.

Attention takes tiles in zigzag order (`Shard.zigzag`), so that all devices have equal work. Most
other operators compute every index of a split dimension by itself, so their tiles may be in either
order, as long as operands and results agree. A value that one operator makes in another order than
a second one reads it in is redistributed, as values are that lie in other tiles. Along each axis,
operators that pass such tiles to each other have one of three orders, the one whose redistributions
have the fewest bytes:

* all of them compute in zigzag order: inputs are reordered once, and labels;
* those that attention depends on do: what follows the last attention computes on neighbours, if its
  results are returned;
* attention alone does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import final

from shardwright.ir.graph import ITEM_BYTES, OPAQUE, Graph, LeafKind, Op, argument
from shardwright.ir.layout import Layout, Placement, Shard, largest_atoms, num_elements
from shardwright.program.lower.offset_ops import placed_dimension
from shardwright.rules.analysis import Analysis
from shardwright.rules.operators.mlp_chunks import number_drawn_by
from shardwright.rules.placements import OpLayouts
from shardwright.rules.rule import Route, Split, joint_split

LayoutsByOp = Mapping[str, OpLayouts]

_BY_POSITION = frozenset(
    {
        "shardwright.dropout.default",
        "shardwright.uniform.default",
        "shardwright.local_batch_norm.default",  # of which samples lie together
        OPAQUE,
    }
)


def in_zigzag_order(graph: Graph, analysis: Analysis, layouts_by_op: LayoutsByOp) -> LayoutsByOp:
    """`layouts_by_op` with zigzag placements where operators compute in that order."""
    attention: dict[int, set[str]] = {}
    for op in graph.ops:
        if analysis.rules[op.name].joint_splits:
            shared = joint_split(layouts_by_op[op.name].tiling)
            if shared is not None and "z" in shared[1].factors:
                attention.setdefault(shared[0], set()).add(op.name)
    for axis, names in attention.items():
        known: dict[int, OpLayouts] = {}  # equal operators share one object, as before
        found = dict(layouts_by_op)
        for name in _Axis(graph, analysis, layouts_by_op, axis, names).chosen():
            before = found[name]
            if id(before) not in known:
                known[id(before)] = reordered(before, axis)
            found[name] = known[id(before)]
        layouts_by_op = found
    return layouts_by_op


def computes_each_index(op: Op, op_layouts: OpLayouts, axis: int) -> bool:
    """Whether an operator with a written rule may have its tiles along `axis` in any order.

    Rules say of which indices a result depends. These operators do not ask where a tile lies, and
    do not draw numbers by its position.
    """
    if not isinstance(op_layouts.tiling[axis], Split | Route):
        return False
    if op.target in _BY_POSITION or number_drawn_by(op) is not None:
        return False
    if (dimension := placed_dimension(op)) is not None:
        operand, dim = dimension
        placement = op_layouts.operands[operand].placements[axis]
        return not (isinstance(placement, Shard) and (dim == 0 or placement.dim == dim))
    if op.kind == "scaled_dot_product_attention":
        return not (argument(op, 4, "dropout_p", 0.0) or argument(op, 5, "is_causal", False))
    return not op_layouts.internal_reductions


@final
class _Axis:
    """The orders of operators along one mesh axis, on which `attention` shares its sequence."""

    def __init__(
        self,
        graph: Graph,
        analysis: Analysis,
        layouts_by_op: LayoutsByOp,
        axis: int,
        attention: set[str],
    ) -> None:
        self.graph, self.analysis, self.axis = graph, analysis, axis
        self.layouts_by_op, self.attention = layouts_by_op, attention
        self.parameters = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
        self.free = {
            op.name
            for op in graph.ops
            if op.name not in analysis.discovered
            and computes_each_index(op, layouts_by_op[op.name], axis)
            and not self._cuts_parameter(op)
        }
        # Of each operator those that make what it reads in the tiles that it needs.
        self.makers: dict[str, list[str]] = {
            op.name: [
                maker.name
                for name, layout in zip(op.operands, layouts_by_op[op.name].operands, strict=True)
                if (maker := graph.producer.get(name)) is not None
                and self._made(name) == self._cut(layout) is not None
            ]
            for op in graph.ops
        }

    def chosen(self) -> set[str]:
        """The operators that compute in zigzag order."""
        found: set[str] = set()
        for part in self._connected():
            attention = part & self.attention
            if not attention:
                continue
            before = self._before(attention) & part
            candidates = (part, before | attention, attention)
            found |= min(candidates, key=lambda names: self._moved(names, part))
        return found

    def _cuts_parameter(self, op: Op) -> bool:
        """Whether an operator reads a parameter in tiles, as learned positions."""
        layouts = zip(op.operands, self.layouts_by_op[op.name].operands, strict=True)
        return any(
            name in self.parameters and self._cut(layout) is not None for name, layout in layouts
        )

    def _connected(self) -> Iterable[set[str]]:
        """Operators that pass on tiles to each other, and of which none needs its neighbours."""
        either = self.free | self.attention
        groups: dict[str, set[str]] = {name: {name} for name in either}
        for op in self.graph.ops:
            for maker in self.makers[op.name]:
                if op.name in either and maker in either:
                    one, other = groups[op.name], groups[maker]
                    if one is not other:
                        small, large = sorted((one, other), key=len)
                        large |= small
                        groups.update(dict.fromkeys(small, large))
        return {id(group): group for group in groups.values()}.values()

    def _before(self, attention: set[str]) -> set[str]:
        """`attention`, and the operators that its operands depend on."""
        found = set(attention)
        for op in reversed(self.graph.ops):
            if op.name in found:
                found.update(name for name in self.makers[op.name] if name in self.free)
        return found

    def _moved(self, zigzag: Collection[str], part: set[str]) -> int:
        """Bytes that are reordered around the operators of `part`, of which some are `zigzag`."""
        read: dict[str, set[bool]] = {}  # value -> the orders in which it is read
        for name in part:
            op, op_layouts = self.graph.op[name], self.layouts_by_op[name]
            for value, layout in zip(op.operands, op_layouts.operands, strict=True):
                if self._cut(layout) is not None:
                    read.setdefault(value, set()).add(name in zigzag)
            for value in op.outputs:
                if self._made(value) is not None:
                    read.setdefault(value, set()).update(self._read_outside(value, part))
        return sum(
            self._bytes(value)
            for value, orders in read.items()
            if (not self._in_order(value, zigzag)) in orders and not self._is_whole(value)
        )

    def _read_outside(self, value: str, part: set[str]) -> Iterable[bool]:
        """False, the order of neighbours, if something beside `part` reads `value`."""
        returned = value in self.graph.outputs or any(value == new for _, new in self.graph.updates)
        if returned or any(op.name not in part for op in self.graph.consumers[value]):
            yield False
        whole = (
            self._cut(layout) is None
            for op in self.graph.consumers[value]
            for name, layout in zip(op.operands, self.layouts_by_op[op.name].operands, strict=True)
            if name == value
        )
        if any(whole):
            yield False

    def _is_whole(self, value: str) -> bool:
        """Whether its producer leaves `value` whole, from which tiles are cut in any order."""
        return value in self.graph.producer and self._made(value) is None

    def _in_order(self, value: str, zigzag: Collection[str]) -> bool:
        maker = self.graph.producer.get(value)
        return maker is not None and maker.name in zigzag and self._made(value) is not None

    def _made(self, value: str) -> Placement | None:
        """The placement of `value`, an operator's result, along the axis, if it is cut there."""
        maker = self.graph.producer.get(value)
        if maker is None:
            return None
        at = maker.outputs.index(value)
        return self._cut(self.layouts_by_op[maker.name].results[at])

    def _cut(self, layout: Layout) -> Placement | None:
        placement = layout.placements[self.axis]
        return placement if isinstance(placement, Shard) else None

    def _bytes(self, value: str) -> int:
        """Bytes of the largest tile of a value, and as many for its gradient."""
        tensor, maker = self.graph.tensor[value], self.graph.producer.get(value)
        elements = prod(tensor.shape)
        if maker is not None:
            layout = self.layouts_by_op[maker.name].results[maker.outputs.index(value)]
            elements = num_elements(largest_atoms(self.analysis.atoms[value], layout))
        return elements * ITEM_BYTES[tensor.dtype] * (1 + tensor.requires_grad)


def reordered(op_layouts: OpLayouts, axis: int) -> OpLayouts:
    """The layouts of an operator that computes in zigzag order along `axis`."""

    def ordered(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(_with_zigzag(layout, axis) for layout in layouts)

    return replace(
        op_layouts,
        operands=ordered(op_layouts.operands),
        results=ordered(op_layouts.results),
        operand_grads=ordered(op_layouts.operand_grads),
    )


def _with_zigzag(layout: Layout, axis: int) -> Layout:
    placement = layout.placements[axis]
    if not isinstance(placement, Shard):
        return layout
    ordered = replace(placement, zigzag=True)
    return Layout(layout.mesh, (*layout.placements[:axis], ordered, *layout.placements[axis + 1 :]))
