"""Attention of a block of queries and keys by torch's fused kernels, with what joins blocks.

The kernels return, beside the result, the log-sum-exp of the scores of each row, and their backward
pass takes that of a row over all blocks, so that no block of scores is in memory (Dao et al.,
"FlashAttention", 2022). `torch.nn.functional` has no call that returns it: the operators of this
file are private ones of torch, which its own context parallelism calls, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.program.instructions import has_fused_blocks

_ATEN = torch.ops.aten


def is_fused(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the device has a fused kernel for attention without a mask, of these tensors."""
    on_cpu = query.device.type == "cpu"
    widths = query.shape[-1], value.shape[-1]
    if not has_fused_blocks(str(query.dtype).removeprefix("torch."), widths, on_cpu=on_cpu):
        return False
    if on_cpu:
        return True
    if query.device.type != "cuda" or not torch.backends.cuda.flash_sdp_enabled():
        return False
    return bool(torch.backends.cuda.is_flash_attention_available()) and (
        torch.version.hip is not None or torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Results of attention to a block, and the log-sum-exp of each row's scores.

    Args:
        query: (..., heads of keys, queries of each, rows, width).
        key: (..., heads, columns, width).
        value: as `key`.
        causal: whether row i sees the columns up to i; there are as many rows as columns then.
        scale: of the scores.

    Returns:
        The shape of `query`; and that without its last dimension, at least in single precision.
    """
    many = query.shape[:-1]
    key, value = _flat(key), _flat(value)
    if query.device.type == "cpu":  # whose kernel takes as many heads of keys as of queries
        made = [
            _ATEN._scaled_dot_product_flash_attention_for_cpu(
                _flat(one), key, value, 0.0, causal, scale=scale
            )
            for one in query.unbind(-3)
        ]
        heads = query.shape[:-3]
        results = [out.view(*heads, *query.shape[-2:]) for out, _ in made]
        sums = [total.reshape(*heads, many[-1]) for _, total in made]
        return torch.stack(results, -3), torch.stack(sums, -2)
    out, total, *_ = _ATEN._scaled_dot_product_flash_attention(
        _flat(query.flatten(-4, -3)), key, value, 0.0, causal, scale=scale
    )
    return out.reshape(query.shape), total.reshape(many)


def gradients(
    given: Tensor,
    block: tuple[Tensor, Tensor, Tensor],
    result: Tensor,
    normalizer: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The part of a block in the gradients of its queries, keys and values.

    Args:
        given: the gradient of the result, of the shape of the queries.
        block: query, key and value, as `attend` takes them.
        result: attention of these queries over all blocks.
        normalizer: the log-sum-exp of the scores of each row over all blocks.
        causal: as in `attend`.
        scale: as in `attend`.
    """
    query, key, value = block
    shapes = key.shape, value.shape
    key, value = _flat(key), _flat(value)
    if query.device.type == "cpu":
        rows = (x.unbind(-3) for x in (given, query, result, normalizer.unsqueeze(-1)))
        made = [
            _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
                _flat(of_one), _flat(one), key, value, _flat(out), _flat(total).squeeze(-1),
                0.0, causal, scale=scale,
            )
            for of_one, one, out, total in zip(*rows, strict=True)
        ]  # fmt: skip
        one_shape = (*query.shape[:-3], *query.shape[-2:])
        of_query = torch.stack([found[0].reshape(one_shape) for found in made], -3)
        of_key, of_value = (sum((one[i] for one in made[1:]), made[0][i]) for i in (1, 2))
    else:
        of_one, one, out = (_flat(x.flatten(-4, -3)) for x in (given, query, result))
        total = _flat(normalizer.flatten(-3, -2).unsqueeze(-1)).squeeze(-1).contiguous()
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # no dropout: no numbers
        of_query, of_key, of_value = _ATEN._scaled_dot_product_flash_attention_backward(
            of_one, one, key, value, out, total, None, None, one.shape[-2], key.shape[-2],
            0.0, causal, unused, unused[:0], scale=scale,
        )  # fmt: skip
        of_query = of_query.reshape(query.shape)
    return of_query, of_key.reshape(shapes[0]), of_value.reshape(shapes[1])


def _flat(x: Tensor) -> Tensor:
    """(..., heads, length, width) as (batch, heads, length, width)."""
    return x.reshape(-1, *x.shape[-3:])
