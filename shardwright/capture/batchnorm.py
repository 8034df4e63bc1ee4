"""Batch norm as sums over the batch and a normalisation, so that splitting the batch is exact.

Two passes, mean first and then the squares of what is left, as numerically
stable as the fused kernel. The number of samples is a constant of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.capture import kernels

aten: Any = torch.ops.aten


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel, in the precision they are kept in, and the count."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    low = x.dtype in (torch.float16, torch.bfloat16)
    total = aten.sum.dim_IntList(x, dims, False, dtype=torch.float32 if low else x.dtype)
    mean = total * (1.0 / count)
    variance = kernels.centered_square_sum(x, mean, 1.0 / count)
    return mean, variance, count


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
    mean, variance, count = _statistics(x)
    out = kernels.normalize(x, mean, variance, weight, bias, eps)
    unbiased = variance.detach().to(running_var.dtype) * (count / max(1, count - 1))
    new_mean = torch.lerp(running_mean, mean.detach().to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, unbiased, momentum)
    return out, mean, torch.rsqrt(variance + eps), new_mean, new_var


def _without_buffers(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit.no_stats`."""
    mean, variance, _ = _statistics(x)
    out = kernels.normalize(x, mean, variance, weight, bias, eps)
    return out, mean, torch.rsqrt(variance + eps)


def frozen(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit_no_training`: the buffers are the statistics."""
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
