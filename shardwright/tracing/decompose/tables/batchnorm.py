"""Decomposes batch norm into sums over the batch and a normalisation; both can be split exactly.

One operator computes both sums and one reads them, so a split of the batch needs one reduction in
each pass. The number of values per channel is a constant of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.tracing.export import kernels

aten: Any = torch.ops.aten


def _mean_squares(x: Tensor) -> tuple[Tensor, int]:
    """Means of x (N, C, ...) and x² per channel, (2, C), and the number of values per channel."""
    count = x.numel() // x.shape[1]
    return kernels.moments(x, 1.0 / count), count


def _inverse(unbiased: Tensor, count: int, eps: float) -> Tensor:
    """1 / √(biased variance + eps), from the unbiased variance of `count` values."""
    return torch.rsqrt(unbiased * ((count - 1) / max(1, count)) + eps)


def _trained(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit_functional`: the new buffers are its last two results."""
    if not training:
        given = (x, weight, bias, running_mean, running_var, momentum, eps)
        return (*frozen(*given), running_mean, running_var)
    moments, count = _mean_squares(x)
    out = kernels.standardize(x, moments, weight, bias, eps)
    mean, variance = kernels.statistics(moments.detach(), count, running_mean.dtype)
    new_mean = torch.lerp(running_mean, mean, momentum)
    new_var = torch.lerp(running_var, variance, momentum)
    return out, mean, _inverse(variance, count, eps), new_mean, new_var


def _without_buffers(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit.no_stats`."""
    moments, count = _mean_squares(x)
    mean, variance = kernels.statistics(moments.detach(), count, x.dtype)
    out = kernels.standardize(x, moments, weight, bias, eps)
    return out, mean, _inverse(variance, count, eps)


def frozen(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit_no_training`: x (N, C, ...) normalised with the buffers (C).

    Returns the normalised x and, like the operator, two empty tensors.
    """
    out = kernels.normalize(x, running_mean, running_var, weight, bias, eps)
    empty = x.new_empty((0,))
    return out, empty, empty


def table() -> dict[Any, Any]:
    """Decompositions by operator."""
    return {
        aten._native_batch_norm_legit_functional.default: _trained,
        aten._native_batch_norm_legit.no_stats: _without_buffers,
        aten._native_batch_norm_legit_no_training.default: frozen,
    }
