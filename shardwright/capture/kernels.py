"""Operators that torch has none for, registered with `torch.library`.

Batch statistics are two sums, each of which may be split, and a normalisation,
which is elementwise: ordinary redistribution of partial sums then makes what
others call synchronised batch norm. They are operators, and not their
formulas, so that autograd keeps the input alone. Random numbers are one operator, which the
runtime replaces by draws that depend on the global index.

Importing this file makes `torch.ops.shardwright` known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNIFORM = "shardwright.uniform.default"  # args: size, number of this draw in the graph


@torch.library.custom_op("shardwright::centered_square_sum", mutates_args=())
def centered_square_sum(x: Tensor, mean: Tensor, scale: float) -> Tensor:
    """Per channel, scale · Σ (x − mean)²; x (N, C, ...), mean (C)."""
    return (x - _channels(mean, x)).square().sum(_others(x)) * scale


@centered_square_sum.register_fake
def _(x: Tensor, mean: Tensor, scale: float) -> Tensor:
    return torch.empty_like(mean)


def _keep_for_squares(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, mean, ctx.scale = inputs
    ctx.save_for_backward(x, mean)


def _squares_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, mean = ctx.saved_tensors
    centered = (x - _channels(mean, x)) * _channels(2.0 * ctx.scale * grad, x)
    return centered.to(x.dtype), -centered.sum(_others(x)), None


centered_square_sum.register_autograd(_squares_backward, setup_context=_keep_for_squares)


@torch.library.custom_op("shardwright::normalize", mutates_args=())
def normalize(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias; x (N, C, ...), the others (C)."""
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    return torch.addcmul(_channels(shift, x), x, _channels(scale, x)).to(x.dtype)


@normalize.register_fake
def _(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    return torch.empty_like(x)


def _keep_for_normalize(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, variance, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, mean, variance, weight)


def _normalize_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, variance, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    inverse = torch.rsqrt(variance + ctx.eps)
    scale = inverse if weight is None else inverse * weight
    grad_x = (grad * _channels(scale, x)).to(x.dtype) if needs[0] else None
    total = grad.sum(_others(x), dtype=mean.dtype)
    grad_mean = -total * scale if needs[1] else None
    grad_variance = grad_weight = None
    if needs[2] or needs[3]:
        # Σ grad · (x − mean), which both the variance and the weight scale.
        along = (grad * (x - _channels(mean, x))).sum(_others(x))
        grad_variance = -0.5 * along * scale * inverse.square() if needs[2] else None
        grad_weight = along * inverse if needs[3] else None
    return grad_x, grad_mean, grad_variance, grad_weight, total if needs[4] else None, None


normalize.register_autograd(_normalize_backward, setup_context=_keep_for_normalize)


@torch.library.custom_op(
    "shardwright::uniform", mutates_args=(), tags=torch.Tag.nondeterministic_seeded
)
def uniform(
    size: Sequence[int], number: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Random numbers in [0, 1). A program on ranks never calls this: see `runtime.dropout`."""
    return torch.rand(size, dtype=dtype, device=device)


@uniform.register_fake
def _(size: Sequence[int], number: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _channels(per_channel: Tensor, x: Tensor) -> Tensor:
    """(C) as (C, 1, ...), which broadcasts against x (N, C, ...)."""
    return per_channel.view(-1, *(1,) * (x.dim() - 2))


def _others(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [d for d in range(x.dim()) if d != 1]
