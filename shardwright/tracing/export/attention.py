"""Scaled dot-product attention by its formula, with a given dropout function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """drop(softmax(q kᵀ · scale + mask)) v; shapes (..., heads, length, width).

    `drop` is applied to the attention weights, (..., heads, queries, keys). The other arguments are
    those of `scaled_dot_product_attention`; with `is_causal` any mask is ignored.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(repeats, -3)
        value = value.repeat_interleave(repeats, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    if is_causal:
        length, source = scores.shape[-2:]
        rows = torch.arange(length, device=query.device)
        columns = torch.arange(source, device=query.device)
        attn_mask = columns <= rows.unsqueeze(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(drop(scores.softmax(-1)), value)
