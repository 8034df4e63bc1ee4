"""Embedding look-ups in a tile of the table: rows outside of the tile give zero.

Importing this file registers `torch.ops.shardwright.embedding_tile` and `embedding_bags`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


def local_index(indices: Tensor, tile: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The positions of global `indices` within a tile of one dimension, and whether they are in it.

    `tile` has start, length and size of each of the dimension's atoms, major first. Indices outside
    of the tile get position zero.
    """
    atoms = [tuple(tile[i : i + 3]) for i in range(0, len(tile), 3)]
    local, inside = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    rest, stride = indices, prod([size for _, _, size in atoms])
    for start, length, size in atoms:
        stride //= size
        digit = rest.div(stride, rounding_mode="floor") - start
        rest = rest.remainder(stride)
        inside = inside & (digit >= 0) & (digit < length)
        local = local * length + digit
    return torch.where(inside, local, 0), inside


@torch.library.custom_op("shardwright::embedding_tile", mutates_args=())
def embedding_tile(
    weight: Tensor, indices: Tensor, tile: Sequence[int], padding_idx: int, scale: bool
) -> Tensor:
    """Rows of a table of which `weight` (rows of the tile, width) is a `tile`; else zeros.

    `indices` are global. Indices outside of the whole table give NaN. All others give the rows of
    `torch.nn.functional.embedding`: `padding_idx` (-1: none) gets no gradient, and with `scale` a
    row's gradient is divided by the number of its look-ups.
    """
    at, inside = local_index(indices, tile)
    known = (indices >= 0) & (indices < prod(tile[2::3]))
    elsewhere = weight.new_zeros(()).masked_fill(~known, float("nan"))
    return torch.where(inside.unsqueeze(-1), weight[at], elsewhere.unsqueeze(-1))


@embedding_tile.register_fake
def _(
    weight: Tensor, indices: Tensor, tile: Sequence[int], padding_idx: int, scale: bool
) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, ctx.tile, ctx.padding, ctx.scale = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
    (indices,) = ctx.saved_tensors
    at, inside = local_index(indices, ctx.tile)
    # One extra row receives the gradients of rows outside of this tile.
    at = torch.where(inside & (indices != ctx.padding), at, ctx.rows)
    total = aten.embedding_dense_backward(grad, at, ctx.rows + 1, ctx.rows, ctx.scale)
    return total[: ctx.rows], None, None, None, None


embedding_tile.register_autograd(_backward, setup_context=_keep)


MODES = ("sum", "mean", "max")  # torch's numbers of the modes


@torch.library.custom_op("shardwright::embedding_bags", mutates_args=())
def embedding_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    last: bool,
    scale: bool,
    tile: Sequence[int],
) -> Tensor:
    """The result (bags, width) of `torch.nn.functional.embedding_bag`.

    `indices` are (bags, look-ups), or one row with the `offsets` of bags, where `last` says that
    the last offset is the end. `padding_idx` is -1 for none. With `tile`, `weight` is that part of
    a whole table (`local_index`), in mode sum or mean without `scale`: rows outside of the tile
    count as zeros, and indices outside of the whole table give NaN.
    """
    options = _BagOptions(mode, padding_idx, last, scale, tile)
    return _bags(weight, indices, offsets, sample_weights, options)


class _BagOptions(NamedTuple):
    """The trailing arguments of `embedding_bags`."""

    mode: int
    padding_idx: int
    last: bool
    scale: bool
    tile: Sequence[int]


@embedding_bags.register_fake
def _(weight: Tensor, indices: Tensor, offsets: Tensor | None, *rest: Any) -> Tensor:
    options = _BagOptions(*rest[1:])
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - options.last
    return weight.new_empty((bags, weight.shape[1]))


def _bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    sample_weights: Tensor | None,
    options: _BagOptions,
) -> Tensor:
    if indices.dim() == 2 and indices.numel() == 0:  # torch takes no offsets for them
        return weight[:0].sum() + weight.new_zeros(indices.shape[0], weight.shape[1])
    arguments: dict[str, Any] = {"include_last_offset": options.last}
    if not options.tile:
        padding = options.padding_idx if options.padding_idx >= 0 else None
        arguments |= {"padding_idx": padding, "scale_grad_by_freq": options.scale}
        arguments |= {"mode": MODES[options.mode], "per_sample_weights": sample_weights}
        return F.embedding_bag(indices, weight, offsets, **arguments)
    counts = (indices != options.padding_idx).to(weight.dtype)
    if sample_weights is not None:
        counts = counts * sample_weights
    at, inside = local_index(indices, options.tile)
    known = (indices >= 0) & (indices < prod(options.tile[2::3]))
    weights = (counts * inside).masked_fill(~known, float("nan"))
    total = F.embedding_bag(
        at, weight, offsets, mode="sum", per_sample_weights=weights, **arguments
    )
    if MODES[options.mode] == "sum":
        return total
    one = weight.new_ones(1, 1)
    zeros = torch.zeros_like(indices)
    often = F.embedding_bag(zeros, one, offsets, mode="sum", per_sample_weights=counts, **arguments)
    return total / often.clamp(min=1)


def _keep_bags(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, offsets, sample_weights, *options = inputs
    ctx.options = _BagOptions(*options)
    ctx.save_for_backward(weight, indices, offsets, sample_weights)


def _bags_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients by torch's own backward pass of the same bags, whose forward pass is repeated."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        weight, indices, offsets, sample_weights = ctx.saved_tensors
        if not again:
            weight = weight.detach().requires_grad_(ctx.needs_input_grad[0])
            if sample_weights is not None:
                sample_weights = sample_weights.detach().requires_grad_(ctx.needs_input_grad[3])
        result = _bags(weight, indices, offsets, sample_weights, ctx.options)
    wanted = {0: weight, 3: sample_weights}
    wanted = {i: tensor for i, tensor in wanted.items() if ctx.needs_input_grad[i]}
    found = torch.autograd.grad(
        result, list(wanted.values()), grad, create_graph=again, allow_unused=True
    )
    gradients = dict(zip(wanted, found, strict=True))
    return tuple(gradients.get(i) for i in range(9))


embedding_bags.register_autograd(_bags_backward, setup_context=_keep_bags)
