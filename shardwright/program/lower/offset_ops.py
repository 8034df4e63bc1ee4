"""Operators whose result depends on the offset of their tile in the whole tensor.

A look-up in a tile of a table gives zeros for rows of other devices; a query attends to the keys up
to its own position in the sequence; a cross entropy over some of the classes needs their indices
and the partial results of the other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from shardwright.ir.graph import Op, argument, with_argument
from shardwright.ir.hosts import goes_by_host
from shardwright.ir.layout import Mesh, Partial
from shardwright.program.instructions import Compute, Joint, Run, SharedAttention
from shardwright.program.lower.routing import routing
from shardwright.rules.operators.loss_chunks import LINEAR_CROSS_ENTROPY
from shardwright.rules.operators.reductions import reduced_dims
from shardwright.rules.placements import OpLayouts
from shardwright.rules.rule import JointSplit

Shape = tuple[int, ...]
Tile = tuple[tuple[int, int, int], ...]  # start, length and size of each atom of one dimension
Positions = Callable[[int], tuple[Tile, ...]]  # of an operand, the tile of each dimension
Runs = tuple[Run, ...]


def placed_call(
    op: Op,
    op_layouts: OpLayouts,
    mesh: Mesh,
    near: Mapping[str, int],
    positions: Positions,
    shapes: tuple[Shape, ...],
) -> Compute | Joint | None:
    """The local call `op` where its tile has to know its position; None where any call would do.

    `near` are the `neighbours` of each device along axes that join several hosts.
    """
    if (dimension := placed_dimension(op)) is not None:
        operand, dim = dimension
        dims = positions(operand)
        tile = dims[min(dim, len(dims) - 1)]
        if op.kind == "embedding":
            return _embedding(op, tile, shapes)
        if op.kind == "embedding_bags":
            return _embedding_bags(op, tile, shapes)
        if op.kind == "experts":
            chosen = prod(size for _, _, size in positions(1)[-1])
            by_host = near if goes_by_host(chosen) else {}
            return _experts(op, op_layouts, tile, shapes, by_host)
        return _cross_entropy(op, op_layouts, mesh, tile, shapes)
    if op_layouts.internal_reductions:
        return _reduction(op, op_layouts, mesh, positions, shapes)
    if op.kind == "scaled_dot_product_attention" and argument(op, 5, "is_causal", False):
        return _causal_rows(op, positions, shapes)
    return None


def placed_dimension(op: Op) -> tuple[int, int] | None:
    """The operand, and its dimension, of which an operator asks what part of it is here.

    Of cross entropies with a single sample the dimension is the last one.
    """
    if op.target == LINEAR_CROSS_ENTROPY:  # the rows of its weight
        return 1, 0
    return _PLACED.get(op.kind)


_PLACED = {
    "embedding": (0, 0),
    "embedding_bags": (0, 0),
    "experts": (3, 0),  # the experts that are held, of which each has a weight
    "cross_entropy_loss": (0, 1),
}


def _embedding(op: Op, tile: Tile, shapes: tuple[Shape, ...]) -> Compute | None:
    if all(length == size for _, length, size in tile):
        return None
    flat = tuple(number for atom in tile for number in atom)
    padding = argument(op, 2, "padding_idx", -1)
    scale = argument(op, 3, "scale_grad_by_freq", False)
    target = "shardwright.embedding_tile.default"
    args = (*op.args[:2], flat, padding, scale)
    return Compute(replace(op, target=target, args=args, kwargs=()), shapes)


def _embedding_bags(op: Op, tile: Tile, shapes: tuple[Shape, ...]) -> Compute | None:
    if all(length == size for _, length, size in tile):
        return None
    flat = tuple(number for atom in tile for number in atom)
    return Compute(with_argument(op, 8, "tile", flat), shapes)


def _experts(
    op: Op,
    op_layouts: OpLayouts,
    tile: Tile,
    shapes: tuple[Shape, ...],
    near: Mapping[str, int],
) -> Compute | None:
    if len(tile) != 1:  # of one expert
        return None
    ((start, length, size),) = tile
    tokens, experts = op_layouts.operands[0], op_layouts.operands[3]
    found = routing(tokens, experts, size, (start, length), near)
    return Compute(op, shapes, routing=found) if found else None


def _causal_rows(op: Op, positions: Positions, shapes: tuple[Shape, ...]) -> Compute | None:
    """Queries that are not all, of which the first may see more than the first key."""
    tile = positions(0)[-2]
    if all(length == size for _, length, size in tile):
        return None
    flat = tuple(number for atom in tile for number in atom)
    given = dict(op.kwargs)
    target = "shardwright.causal_rows.default"
    args = (*op.args[:3], flat, given.get("scale"), given.get("enable_gqa", False))
    return Compute(replace(op, target=target, args=args, kwargs=()), shapes)


def shared_attention(
    op: Op,
    choice: JointSplit,
    axis: str,
    position: int,
    queries: tuple[Runs, ...],
    keys: tuple[Runs, ...],
) -> SharedAttention:
    """Attention whose queries, and keys as `choice` says, lie so on the devices along `axis`."""
    return SharedAttention(op, axis, position, queries, keys if "s" in choice.factors else ())


def _cross_entropy(
    op: Op, op_layouts: OpLayouts, mesh: Mesh, tile: Tile, shapes: tuple[Shape, ...]
) -> Joint | None:
    """The classes, of which `tile` is here, split over some axes."""
    if all(length == size for _, length, size in tile):
        return None
    first = all(start == 0 for start, _, _ in tile)
    return Joint(op, _agreeing(op_layouts, mesh), tile, first, shapes)


def _reduction(
    op: Op, op_layouts: OpLayouts, mesh: Mesh, positions: Positions, shapes: tuple[Shape, ...]
) -> Joint | None:
    """A reduction whose operand is split along reduced dimensions; None if it is not."""
    axes, dims = _agreeing(op_layouts, mesh), positions(0)
    if not axes:
        return None
    reduced = [dims[dim] for dim in reduced_dims(op, len(dims))]
    first = all(start == 0 and length > 0 for tile in reduced for start, length, _ in tile)
    return Joint(op, axes, (), first, shapes)


def _agreeing(op_layouts: OpLayouts, mesh: Mesh) -> tuple[str, ...]:
    """The axes along which devices have terms of what is inside of the operator."""
    return tuple(
        name
        for name, placement in zip(
            mesh.names, op_layouts.internal_reductions[0].placements, strict=True
        )
        if isinstance(placement, Partial)
    )
