"""Rewrites the selection of elements of samples, `x[torch.arange(batch), positions]`, as a gather.

An index into the first dimension may refer to any sample, so an operator with one cannot be split
along the batch. If the index enumerates all samples in order, each row of the result reads its own
sample only; a gather along the second dimension expresses this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten: Any = torch.ops.aten

_COUNTS = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_RESHAPES = (aten.unsqueeze.default, aten.view.default, aten.reshape.default)


def gather_selected(graph: fx.Graph) -> None:
    """Replace, in place, each `index` operator that selects elements of every sample in order."""
    for node in list(graph.nodes):
        if (
            node.target is aten.index.Tensor
            and (positions := _selected_positions(*node.args)) is not None
        ):
            with graph.inserting_before(node):
                found = _Inserted(graph, node).gathered(node.args[0], positions)
            node.replace_all_uses_with(found)
            graph.erase_node(node)


def _selected_positions(value: fx.Node, indices: Any) -> fx.Node | None:
    """The second of two indices if the first enumerates the samples, else None."""
    if len(indices) != 2 or not all(isinstance(index, fx.Node) for index in indices):
        return None
    first, positions = indices
    whole, sample, picked = (node.meta["val"] for node in (value, first, positions))
    batch = whole.shape[0]
    sizes = (batch, *sample.shape, *picked.shape)
    if not all(isinstance(size, int) for size in sizes):  # positions that data decide
        return None
    one_each = tuple(sample.shape) == (batch,) + (1,) * (picked.dim() - 1)
    if picked.dtype != torch.int64 or picked.dim() not in (1, 2) or picked.shape[0] != batch:
        return None
    return positions if one_each and batch > 1 and _counts(first, batch) else None


def _counts(node: fx.Node, batch: int) -> bool:
    """Whether `node` has the integers 0 to `batch - 1` in order."""
    while node.target in _RESHAPES:
        (node, *_) = node.args  # type: ignore[assignment]
    if node.target not in _COUNTS or node.meta["val"].dtype != torch.int64:
        return False
    start, end, step = {1: (0, *node.args, 1), 2: (*node.args, 1)}.get(len(node.args), node.args)
    return (start, end, step) == (0, batch, 1)


class _Inserted:
    """Inserts calls into a graph with the metadata of `node`, which they replace."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph = graph
        self.place = node

    def gathered(self, value: fx.Node, positions: fx.Node) -> fx.Node:
        """Elements of `value` at `positions` of the second dimension, for each sample.

        `value` is (batch, length, ...), `positions` (batch) or (batch, n).
        """
        batch, length, *rest = value.meta["val"].shape
        # A gather takes no negative positions; both operators raise if they are out of range.
        negative = self.call(aten.lt.Scalar, positions, 0)
        shifted = self.call(aten.add.Tensor, positions, length)
        positions = self.call(aten.where.self, negative, shifted, positions)
        one = positions.meta["val"].dim() == 1
        if one:
            positions = self.call(aten.unsqueeze.default, positions, 1)
        for _ in rest:
            positions = self.call(aten.unsqueeze.default, positions, positions.meta["val"].dim())
        sizes = [batch, positions.meta["val"].shape[1], *rest]
        positions = self.call(aten.expand.default, positions, sizes)
        found = self.call(aten.gather.default, value, 1, positions)
        return self.call(aten.squeeze.dim, found, 1) if one else found

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = dict(self.place.meta)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda one: one.meta["val"]))
        return node
