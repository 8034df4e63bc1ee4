"""Batch norm with statistics of the local part of the batch: `batch_norm="local"`.

It is one operator, which a rank computes on its tile without any communication. Only the statistics
for the running buffers are reduced: each rank weights its own by its fraction of the batch, and
their sum over ranks is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.ir.options.numerics import Numerics
from shardwright.tracing.decompose.tables import batchnorm
from shardwright.tracing.export.kernels import statistics_dtype

aten: Any = torch.ops.aten


@torch.library.custom_op("shardwright::local_batch_norm", mutates_args=())
def local_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    share: float,
    eps: float,
    parts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise x (N, C, ...) with the statistics of each part of the local batch.

    `parts` has for each sample the index of its part; empty means one part. Returns the normalised
    x; mean and 1 / √(variance + eps) of each part, (parts, C) each, for the backward pass; and mean
    and unbiased variance, averaged over parts by size and multiplied by `share`, (2, C). `weight`
    and `bias` are (C). Raises `ValueError` if a part has only one value per channel, so that the
    variance is undefined.
    """
    kept = statistics_dtype(x)
    weight, bias = (None if p is None else p.to(kept) for p in (weight, bias))
    out = torch.empty_like(x)
    total = x.new_zeros((2, x.shape[1]), dtype=kept)
    means, inverses = [], []
    for rows in _rows(x, parts):
        part = x[rows]
        if part.numel() <= x.shape[1]:
            raise ValueError(
                f"batch_norm='local' has one value per channel in a part of {len(part)} of a batch"
                f" of shape {tuple(x.shape)}; take a larger batch, or batch_norm='exact'"
            )
        # With a momentum of one the buffers become the statistics.
        mean, variance = x.new_zeros((2, x.shape[1]), dtype=kept).unbind()
        result = aten.native_batch_norm(part, weight, bias, mean, variance, True, 1.0, eps)
        out[rows] = result[0]
        means.append(result[1])
        inverses.append(result[2])
        total += torch.stack([mean, variance]) * (len(part) / len(x))
    return out, torch.stack(means), torch.stack(inverses), total * share


@local_batch_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    share: float,
    eps: float,
    parts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    per_part = x.new_empty((max(1, len(set(parts))), x.shape[1]), dtype=statistics_dtype(x))
    return torch.empty_like(x), per_part, per_part.clone(), per_part.new_empty((2, x.shape[1]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _, ctx.eps, ctx.parts = inputs
    _, mean, inverse, statistics = output
    ctx.save_for_backward(x, weight, mean, inverse)
    ctx.mark_non_differentiable(mean, inverse, statistics)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, means, inverses = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    grad_x = torch.empty_like(x) if needs[0] else None
    totals: list[Tensor | None] = [None, None]
    scale = None if weight is None else weight.to(statistics_dtype(x))
    for rows, mean, inverse in zip(_rows(x, ctx.parts), means, inverses, strict=True):
        part, *others = aten.native_batch_norm_backward(
            grad[rows].contiguous(),
            x[rows],
            scale,
            None,
            None,
            mean,
            inverse,
            True,
            ctx.eps,
            needs,
        )
        if grad_x is not None:
            grad_x[rows] = part
        totals = [
            one if total is None else total + one for total, one in zip(totals, others, strict=True)
        ]
    return (
        grad_x,
        *(t.to(weight.dtype) if n and t is not None else None
          for n, t in zip(needs[1:], totals, strict=True)),
        None,
        None,
        None,
    )  # fmt: skip


local_batch_norm.register_autograd(_backward, setup_context=_keep)


def _rows(x: Tensor, parts: Sequence[int]) -> list[Any]:
    """For each part an index into x that selects its samples."""
    if not parts:
        return [slice(None)]
    number = torch.tensor(parts, device=x.device)
    return [(number == part).nonzero().flatten() for part in sorted(set(parts))]


def _with_buffers(
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
    if not training:  # all parts are normalised with the buffers
        given = (x, weight, bias, running_mean, running_var, momentum, eps)
        return (*batchnorm.frozen(*given), running_mean, running_var)
    out, mean, inverse, statistics = local_batch_norm(x, weight, bias, 1.0, eps, [])
    # Mean and variance in one tensor need only one reduction. The update is written as a sum, so
    # that it accumulates over micro-batches.
    old = torch.stack([running_mean, running_var])
    new_mean, new_var = (
        old * (1 - momentum) + statistics.detach().to(old.dtype) * momentum
    ).unbind()
    return out, mean[0], inverse[0], new_mean, new_var


def _without_buffers(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """`_native_batch_norm_legit.no_stats`."""
    out, mean, inverse, _ = local_batch_norm(x, weight, bias, 1.0, eps, [])
    return out, mean[0], inverse[0]


def table(numerics: Numerics) -> dict[Any, Any]:
    """Decompositions by operator that replace those of `batchnorm`; empty unless "local"."""
    if numerics.batch_norm != "local":
        return {}
    return {
        aten._native_batch_norm_legit_functional.default: _with_buffers,
        aten._native_batch_norm_legit.no_stats: _without_buffers,
    }
