"""Causal attention for a slice of the queries, each attending to keys up to its global position.

The flag `is_causal` numbers queries and keys from zero, so it is correct only for the first slice.
Importing this file registers `torch.ops.shardwright.causal_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shardwright.tracing.export.second_derivative import refuse_second_derivative

_LARGEST_MASK = 2**24  # elements, e.g. of 512 queries and 32k keys


def causal_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tile: Sequence[int],
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Causal attention of a `tile` of the queries: (..., heads, length, width).

    `query` has the queries of the tile, (..., heads, length, width); `key` and `value` those of the
    whole sequence. `tile` has start, length and size of each atom of the dimension of the
    positions, major first; it says which global positions the queries have. `scale` is that of
    `scaled_dot_product_attention`. With `grouped`, several heads of queries share a head of keys.
    Except on the fused path, a second derivative raises `RuntimeError`.
    """
    start, length = tile[:2]
    seen = start + length
    if query.is_cuda and len(tile) == 3 and seen <= key.shape[-2]:
        # The last rows of a lower triangle, for which fused kernels exist.
        return scaled_dot_product_attention(
            query,
            key[..., :seen, :],
            value[..., :seen, :],
            attn_mask=causal_lower_right(length, seen),
            scale=scale,
            enable_gqa=grouped,
        )
    result: Tensor = _Rows.apply(query, key, value, tile, scale, grouped)  # type: ignore[no-untyped-call]
    return result


class _Rows(torch.autograd.Function):
    """Attention of a group of queries at a time, which bounds the size of the mask.

    Saves the operands only: the backward pass recomputes the attention of each group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tile: Sequence[int],
        scale: float | None,
        grouped: bool,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tile, ctx.scale, ctx.grouped = tile, scale, grouped
        found = []
        for part, seen, rows in _query_groups(query, key, tile):
            given = query[..., part, :], key[..., :seen, :], value[..., :seen, :]
            found.append(_attend(given, rows, scale, grouped))
        return torch.cat(found, -2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(
            "causal attention in groups of rows", "write it as products and a softmax"
        )
        query, key, value = ctx.saved_tensors
        wanted: list[Tensor] = []
        total_key, total_value = torch.zeros_like(key), torch.zeros_like(value)
        for part, seen, rows in _query_groups(query, key, ctx.tile):
            tiles = query[..., part, :], key[..., :seen, :], value[..., :seen, :]
            with torch.enable_grad():
                given = tuple(x.detach().requires_grad_() for x in tiles)
                out = _attend(given, rows, ctx.scale, ctx.grouped)
            one, two, three = torch.autograd.grad(out, given, grads[0][..., part, :])
            wanted.append(one)
            total_key[..., :seen, :] += two
            total_value[..., :seen, :] += three
        return torch.cat(wanted, -2), total_key, total_value, None, None, None


def _attend(given: tuple[Tensor, ...], rows: Tensor, scale: float | None, grouped: bool) -> Tensor:
    query, key, value = given
    mask = torch.arange(key.shape[-2], device=key.device) <= rows.unsqueeze(-1)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)


def _query_groups(
    query: Tensor, key: Tensor, tile: Sequence[int]
) -> Iterator[tuple[slice, int, Tensor]]:
    """Groups of queries: their slice of the tile, a number of keys, their global positions.

    The number of leading keys is enough for all queries of the group.
    """
    rows, length = _rows(tile, query.device), query.shape[-2]
    step = max(16, _LARGEST_MASK // key.shape[-2])
    for start in range(0, length, step):
        end = min(start + step, length)
        seen = min(tile[0] + end, key.shape[-2]) if len(tile) == 3 else key.shape[-2]
        yield slice(start, end), seen, rows[start:end]


def _rows(tile: Sequence[int], device: torch.device) -> Tensor:
    """The global positions of the queries of a tile, which need not be contiguous."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for i in range(0, len(tile), 3):
        start, length, size = tile[i : i + 3]
        part = torch.arange(start, start + length, device=device)
        rows = (rows.unsqueeze(-1) * size + part).flatten()
    return rows


torch.library.define(
    "shardwright::causal_rows",
    "(Tensor query, Tensor key, Tensor value, int[] tile, float? scale, bool grouped) -> Tensor",
)
torch.library.impl("shardwright::causal_rows", "CompositeImplicitAutograd", causal_rows)
