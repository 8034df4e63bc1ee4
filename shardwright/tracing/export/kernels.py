"""Registers the operators that torch lacks, with `torch.library`.

Batch statistics are sums, which can be split, and a normalisation, which is elementwise:
redistributing the partial sums then gives synchronised batch norm. They are operators instead of
formulas so that autograd saves the input only, and one reduction per pass suffices. Random numbers
are one operator, which the runtime replaces by draws that depend on the global index.

Importing this file registers `torch.ops.shardwright`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.tracing.export.second_derivative import refuse_second_derivative

aten: Any = torch.ops.aten
UNIFORM = "shardwright.uniform.default"  # args: size, number of this draw in the graph


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which statistics of `x` are computed: at least float32."""
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


@torch.library.custom_op("shardwright::moments", mutates_args=())
def moments(x: Tensor, scale: float) -> Tensor:
    """Per channel, scale · Σ x and scale · Σ x², float64 (2, C), of x (N, C, ...).

    Squares are summed about the local mean and shifted in double precision, so that the variance m₁
    − m₀² keeps its digits for any mean (Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979).
    """
    count = x.numel() // max(1, x.shape[1])
    if not count:
        return x.new_zeros((2, x.shape[1]), dtype=torch.float64)
    mean, variance = (one.double() for one in _local_statistics(x, count))
    return torch.stack([mean, variance + mean.square()]) * (count * scale)


@moments.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float64)


def _keep_for_moments(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    x, ctx.scale = inputs
    ctx.save_for_backward(x)


def _moments_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    constant, linear = (grad * ctx.scale).to(statistics_dtype(x))
    one, none = torch.ones_like(linear), torch.zeros_like(linear)
    # A fused multiplication and addition per channel.
    return _normalized(x, none, one, 2.0 * linear, constant, eps=0.0), None


moments.register_autograd(_moments_backward, setup_context=_keep_for_moments)


@torch.library.custom_op("shardwright::statistics", mutates_args=())
def statistics(moments: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance, (C) each, of `count` samples with the means `moments` (2, C)."""
    mean, variance = _mean_and_variance(moments)
    return mean.to(dtype, copy=True), (variance * (count / max(1, count - 1))).to(dtype)


@statistics.register_fake
def _(moments: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    channel = moments.new_empty(moments.shape[1:], dtype=dtype)
    return channel, channel.clone()


@torch.library.custom_op("shardwright::standardize", mutates_args=())
def standardize(
    x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`normalize` with mean m₀ and variance m₁ − m₀² of float64 `moments` (2, C).

    The moments are one operand, so that one reduction sums their gradient over devices.
    """
    return _normalized(x, *_mean_and_variance(moments), weight, bias, eps)


@standardize.register_fake
def _(x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


def _keep_for_standardize(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, moments, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, moments, weight)


def _standardize_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative("a batch norm", "take a layer norm or a group norm")
    x, moments, weight = ctx.saved_tensors
    mean, variance = _mean_and_variance(moments)
    grad_x, along, total = _gradients(grad, x, mean, variance, weight, ctx.eps)
    inverse = torch.rsqrt(variance + ctx.eps)
    scale = inverse if weight is None else inverse * weight
    by_variance = -0.5 * inverse * scale * along
    by_mean = -scale * total - 2.0 * mean * by_variance
    needs = ctx.needs_input_grad
    return (
        grad_x,
        torch.stack([by_mean, by_variance]) if needs[1] else None,
        along.to(weight.dtype) if needs[2] else None,
        total.to(statistics_dtype(x) if weight is None else weight.dtype) if needs[3] else None,
        None,
    )


standardize.register_autograd(_standardize_backward, setup_context=_keep_for_standardize)


@torch.library.custom_op("shardwright::normalize", mutates_args=())
def normalize(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """(x − mean) / √(variance + eps) · weight + bias; x (N, C, ...), the others (C).

    Mean and variance are buffers and get no gradients.
    """
    return _normalized(x, mean, variance, weight, bias, eps)


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
    grad_x, along, total = _gradients(grad, x, mean, variance, weight, ctx.eps)
    needs = ctx.needs_input_grad
    return (
        grad_x,
        None,
        None,
        along.to(weight.dtype) if needs[3] else None,
        total.to(mean.dtype if weight is None else weight.dtype) if needs[4] else None,
        None,
    )


normalize.register_autograd(_normalize_backward, setup_context=_keep_for_normalize)


@torch.library.custom_op(
    "shardwright::uniform", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def uniform(
    size: Sequence[int], number: int, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Uniform random numbers in [0, 1) of shape `size`, for draw `number` of a graph.

    The runtime replaces this operator (`runtime/random/dropout.py`).
    """
    return torch.rand(size, dtype=dtype, device=device)


@uniform.register_fake
def _(size: Sequence[int], number: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _channels(per_channel: Tensor, x: Tensor) -> Tensor:
    """`per_channel` (C) as (C, 1, ...), which broadcasts against x (N, C, ...)."""
    return per_channel.view(-1, *(1,) * (x.dim() - 2))


def _others(x: Tensor) -> list[int]:
    """All dimensions of `x` except the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _local_statistics(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the `count` values of each channel, (C) each."""
    if x.is_cuda:  # one kernel, without a temporary of the size of x
        tiny = torch.finfo(statistics_dtype(x)).tiny  # so that no variance is divided by
        mean, inverse = torch.batch_norm_stats(x, tiny)
        return mean, inverse.double().square().reciprocal() - tiny
    mean = x.sum(_others(x), dtype=statistics_dtype(x)) / count
    return mean, (x - _channels(mean, x)).square_().sum(_others(x)) / count


def _mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    mean, squares = moments.unbind()
    return mean, (squares - mean.square()).clamp_min(0.0)


def _normalized(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """The normalisation as one fused kernel, which does not compute statistics of x."""
    dtype = statistics_dtype(x)
    given = [None if one is None else one.to(dtype) for one in (weight, bias, mean, variance)]
    out: Tensor = aten.native_batch_norm(x, *given, False, 0.0, eps)[0]
    return out


def _laid_like(grad: Tensor, x: Tensor) -> Tensor:
    """`grad` in the memory layout of `x`.

    The backward kernel on CPUs takes strides of sizes of 1, as of a single sample, for those of
    another layout, and gives wrong gradients without an error (torch 2.13).
    """
    if x.is_cuda or 1 not in x.shape or grad.stride() == x.stride():
        return grad
    return torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def _gradients(
    grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, with mean and variance constant."""
    dtype = statistics_dtype(x)
    kept = [None if one is None else one.to(dtype) for one in (weight, mean, variance)]
    found: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm_backward(
        _laid_like(grad, x), x, *kept, None, None, False, eps, [True, True, True]
    )
    return found
