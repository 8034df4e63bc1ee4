"""Look-ups in part of a table: each device looks up the rows that it holds, the rest is zero.

Importing this file makes `torch.ops.shardwright.embedding_tile` known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def local_index(indices: Tensor, tile: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Where global `indices` along one dimension lie within a tile of it, and whether they do.

    `tile` has start, length and size of each of the dimension's atoms, major
    first. Indices outside of it get the place zero.
    """
    atoms = [tuple(tile[i : i + 3]) for i in range(0, len(tile), 3)]
    local, inside = torch.zeros_like(indices), torch.ones_like(indices, dtype=torch.bool)
    rest, stride = indices, prod(size for _, _, size in atoms)
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
    """Rows of a table of which `weight` (rows held, width) is a `tile`; zeros for other rows.

    `indices` are global. Rows that the whole table has not are not a number. The others
    are those of `torch.nn.functional.embedding`: `padding_idx` (-1: none) gets no
    gradient, with `scale` a row's gradient is divided by how often it is looked up.
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
    # One more row takes what no row of this tile gets.
    at = torch.where(inside & (indices != ctx.padding), at, ctx.rows)
    total = aten.embedding_dense_backward(grad, at, ctx.rows + 1, ctx.rows, ctx.scale)
    return total[: ctx.rows], None, None, None, None


embedding_tile.register_autograd(_backward, setup_context=_keep)
