"""Rewrites operators before planning so that splitting the remaining ones is exact.

The mean over a batch is not the mean of the means of tiles that differ in size or in the number of
ignored labels. Means become sums, divided by the number of elements, which is a constant, or by the
number of labels that are not ignored, which is a sum too. With `rng="exact"`, attention with
dropout becomes its formula, because a fused kernel would draw its own random numbers.

Functions return Any: the results, or NotImplemented to leave the call unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.ir.options.numerics import EXACT, Numerics
from shardwright.tracing.decompose.tables import (
    batchnorm,
    composed_losses,
    deviations,
    local_batchnorm,
    random_ops,
    recurrent,
    strided,
)
from shardwright.tracing.export.attention import attention
from shardwright.tracing.values.selection import placements

aten: Any = torch.ops.aten

_MEAN, _SUM = 1, 2  # ATen's Reduction enum


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return aten.sum.default(x, dtype=dtype) * (1.0 / x.numel())


def _mean_dim(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    total = aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    return total * (total.numel() / x.numel())


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if reduction != _MEAN:
        return NotImplemented
    total = aten.cross_entropy_loss.default(
        logits, target, weight, _SUM, ignore_index, label_smoothing
    )
    if target.is_floating_point():  # class probabilities: the mean is over the samples
        return total * (logits.shape[1] / logits.numel() if logits.dim() > 1 else 1.0)
    return _mean_over_targets(total, target, weight, ignore_index)


def _mean_over_targets(
    total: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor:
    """`total` divided by the number, or the weight, of the targets that are not ignored."""
    kept = target != ignore_index
    if weight is None:
        count = kept.to(total.dtype).sum()
    else:
        count = weight[torch.where(kept, target, 0)].mul(kept.to(weight.dtype)).sum()
    return total / count


def _nll_loss(
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> Any:
    if reduction != _MEAN:
        return NotImplemented
    total = aten.nll_loss_nd.default(log_probs, target, weight, _SUM, ignore_index)
    return _mean_over_targets(total, target, weight, ignore_index)


def _pointwise_loss(operator: Any, reduction_at: int) -> Callable[..., Any]:
    """A loss that is a mean over all elements, as a sum times the reciprocal of their number.

    `reduction_at` is the position of the operator's `reduction` argument; the
    arguments between it and the two tensors are optional weights.
    """

    def decomposed(*args: Any, reduction: int = _MEAN, **kwargs: Any) -> Any:
        before = args[:reduction_at] + (None,) * (reduction_at - len(args))
        if len(args) > reduction_at:
            reduction = args[reduction_at]
        if reduction != _MEAN:
            return NotImplemented
        total = operator(*before, _SUM, *args[reduction_at + 1 :], **kwargs)
        elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        return total * (1.0 / elements)

    return decomposed


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with dropout as its formula (`export/attention.py`); other calls are unchanged."""
    if dropout_p == 0.0:
        return NotImplemented

    def drop(weights: Tensor) -> Tensor:
        dropped: Tensor = aten.native_dropout.default(weights, dropout_p, True)[0]
        return dropped

    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa, drop)


def _type_as(x: Tensor, other: Tensor) -> Tensor:
    return x.to(other.dtype)


def _chalf(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    """A cast with an explicit dtype, so that the graph can be converted to float64."""
    return x.to(torch.complex32)


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """The functional `x[...] = y` as a cast and an expansion; the operator has no derivative."""
    return source.to(into.dtype).expand(into.shape)


def _repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeats along a dimension of length one as an expansion, whose result can be split."""
    if dim is None or x.shape[dim] != 1:
        return NotImplemented
    sizes = list(x.shape)
    sizes[dim] = repeats
    return x.expand(sizes)


def _masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Any:
    """Rows of `source` in place of those of `x` where `mask` is True, as a look-up of rows.

    `mask` is (..., 1) or expanded from it, or has the shape of `x`, whose rows are then numbers.
    The positions of rows are integers; rows of `x` can be split, like those of a look-up.
    """
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    mask, dims = mask.expand(shape), len(shape)
    while dims and (shape[dims - 1] == 1 or mask.stride(dims - 1) == 0):
        dims -= 1
    width = prod(shape[dims:])
    rows = source.numel() // max(1, width)
    if not rows:
        return NotImplemented
    marked = mask
    for dim in reversed(range(dims, len(shape))):
        marked = marked.select(dim, 0)
    at = placements(marked, rows)
    placed = source.reshape(-1)[: rows * width].view(rows, *shape[dims:])[at]
    return torch.where(mask, placed, x)


def table(numerics: Numerics = EXACT) -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator, for `ExportedProgram.run_decompositions`.

    Those of attention and of batch norm depend on `numerics.rng` and `numerics.batch_norm`.
    """
    losses = {
        aten.mse_loss.default: 2,
        aten.l1_loss.default: 2,
        aten.smooth_l1_loss.default: 2,
        aten.huber_loss.default: 2,
        aten.binary_cross_entropy.default: 3,
        aten.binary_cross_entropy_with_logits.default: 4,
    }
    found: dict[Any, Callable[..., Any]] = {
        operator: _pointwise_loss(operator, at) for operator, at in losses.items()
    }
    found[aten.mean.default] = _mean
    found[aten.mean.dim] = _mean_dim
    found[aten.cross_entropy_loss.default] = _cross_entropy
    found[aten.nll_loss_nd.default] = _nll_loss
    if numerics.rng == "exact":
        found[aten.scaled_dot_product_attention.default] = _attention
    found[aten.type_as.default] = _type_as
    found[aten.copy.default] = _copy
    found[aten.chalf.default] = _chalf
    found[aten.repeat_interleave.self_int] = _repeat_interleave
    found[aten.masked_scatter.default] = _masked_scatter
    norms = {**batchnorm.table(), **local_batchnorm.table(numerics)}
    composed = {**composed_losses.table(), **deviations.table()}
    return {
        **found,
        **norms,
        **composed,
        **random_ops.table(),
        **recurrent.table(),
        **strided.table(),
    }
