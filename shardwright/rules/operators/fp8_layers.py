"""Finds the linear layers whose products a recipe runs in 8 bits, and marks a graph with it.

Those are linear layers of a parameter whose sizes are multiples of 16, as the kernels require, but
for the last projection: torchtitan leaves its `output` out by default, and Megatron-LM's output
layer is not one of TransformerEngine's. Attention and embeddings stay as they are, and experts do
under torchao, which has an option of its own for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from shardwright.ir.graph import Graph, LeafKind, Op
from shardwright.ir.options.fp8 import FLOAT8, Fp8Recipe, recipe_of

MULTIPLE = 16  # of the elements of a row, for products in 8 bits
_DTYPES = ("bfloat16", "float16", "float32")  # of their results
_PRODUCTS = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "experts")


class Fp8LayersError(ValueError):
    """A graph of which a recipe runs no product in 8 bits."""


def with_fp8(graph: Graph, recipe: Fp8Recipe) -> Graph:
    """`graph` with the products of its linear layers in 8 bits, by a recipe.

    Where the recipe saves inputs in 8 bits, the first layer that reads one keeps that copy, and no
    layer the input. Where it gathers weights, those that only such layers read are gathered in 8
    bits. Raises `Fp8LayersError` if no layer is in 8 bits.
    """
    numerics = replace(graph.numerics, fp8=recipe.key)
    layers = _layers(graph)
    if not layers:
        raise Fp8LayersError(
            f"no linear layer but the last has sizes that are multiples of {MULTIPLE}, in 16 or 32"
            " bits"
        )
    if recipe.gathers:
        graph = _gathering(graph, layers)
    if not recipe.saves_8_bit:
        return replace(graph, numerics=numerics)
    ops = tuple(
        _saving_8_bit(graph, op, recipe, layers[op.name]) if op.name in layers else op
        for op in graph.ops
    )
    return replace(graph, ops=ops, numerics=numerics)


def _gathering(graph: Graph, layers: Mapping[str, bool]) -> Graph:
    """`graph` with weights that only `layers` read gathered in 8 bits."""
    weights = {graph.op[name].operands[1] for name in layers}
    alone = {w for w in weights if all(op.name in layers for op in graph.consumers[w])}
    values = (replace(v, gathered_as=FLOAT8) if v.name in alone else v for v in graph.values)
    return replace(graph, values=tuple(values))


def fp8_layers(graph: Graph) -> Mapping[str, bool]:
    """Operators in 8 bits by name, and whether each is the first that reads its input.

    The others take the cast of the first: the compiler computes equal casts once, and
    TransformerEngine has one layer for several of one input. Empty for a graph without a recipe.
    """
    return _layers(graph) if graph.numerics.fp8 else {}


def experts_in_8_bit(graph: Graph, op: Op) -> bool:
    """Whether `op` is a mixture of experts whose grouped products are in 8 bits."""
    recipe = recipe_of(graph.numerics.fp8)
    if recipe is None or not recipe.covers_experts or op.kind != "experts":
        return False
    weights = op.operands[3:5]
    return not any(size % MULTIPLE for name in weights for size in graph.tensor[name].shape[1:])


def _layers(graph: Graph) -> dict[str, bool]:
    """The layers that a recipe applies to; of each whether it is the first reader of its input."""
    found: dict[str, bool] = {}
    seen: set[str] = set()
    followed = _followed(graph)
    weights = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    for op in graph.ops:
        if op.kind != "linear" or op.name not in followed or op.operands[1] not in weights:
            continue
        weight = graph.tensor[op.operands[1]]
        if weight.dtype not in _DTYPES or any(size % MULTIPLE for size in weight.shape):
            continue
        found[op.name] = op.operands[0] not in seen
        seen.add(op.operands[0])
    return found


def _followed(graph: Graph) -> set[str]:
    """Operators on whose results another product depends."""
    needed: set[str] = set()  # values from which a path leads to a product
    found: set[str] = set()
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.outputs):
            found.add(op.name)
            needed.update(op.operands)
        if op.kind in _PRODUCTS or op.kind in ("linear_cross_entropy", "chunked_mlp"):
            needed.update(op.operands)
    return found


def _saving_8_bit(graph: Graph, op: Op, recipe: Fp8Recipe, is_first: bool) -> Op:
    """`op`, which keeps its input in 8 bits if it is the first that reads it, and not the input."""
    given = op.operands[0]
    if given not in op.saves:
        return op
    elements = math.prod(graph.tensor[given].shape)
    copy = math.ceil(elements * (1 + recipe.scale_bytes)) if is_first else 0
    return replace(op, saves=tuple(name for name in op.saves if name != given), extra_saved=copy)
