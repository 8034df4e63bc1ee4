"""Cross entropy of half-precision logits in float32, without their float32 copy.

Both passes cast some rows at a time. The forward pass keeps the half-precision logits and the
labels; the backward pass computes the probabilities p of its rows again and rounds the gradient of
a row, (p − 1 at its label, p elsewhere) times that of its loss, to the dtype of the logits, as the
backward pass of a cast does.

Importing this file registers `torch.ops.shardwright.cross_entropy_loss`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.rules.operators.half_logits import row_parts
from shardwright.tracing.export.kernels import statistics_dtype

aten: Any = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # ATen's Reduction enum


def cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of `logits` cast to float32 if they are in half precision.

    Args:
        logits: (samples, classes).
        target: the class of each sample, (samples).
        weight: of each class, (classes); None: 1.
        reduction: 0, 1 or 2 for none, the mean or the sum.
        ignore_index: the label of samples that do not count.
        label_smoothing: the part of the target distribution that is spread over all classes.

    Returns:
        The loss in float32, or in the dtype of logits of higher precision: a scalar or (samples).
        Means, weights and smoothing are computed on a cast of all logits.
    """
    plain = weight is None and reduction != _MEAN and not label_smoothing
    plain = plain and logits.dim() == 2 and target.dim() == 1
    wide = statistics_dtype(logits)
    if wide != logits.dtype and plain:
        found: Tensor = _losses(logits, target, reduction == _SUM, ignore_index)
        return found
    whole: Tensor = aten.cross_entropy_loss.default(
        logits.to(wide), target, weight, reduction, ignore_index, label_smoothing
    )
    return whole


@torch.library.custom_op("shardwright::half_cross_entropy", mutates_args=())
def _losses(logits: Tensor, target: Tensor, summed: bool, ignored: int) -> Tensor:
    """The loss of each sample in float32, (samples), or their sum."""
    kept, at = _labels(target, ignored)
    chosen = logits.new_empty(at.shape, dtype=torch.float32)
    for rows in row_parts(*logits.shape):
        part = torch.log_softmax(logits[rows], 1, dtype=torch.float32)
        torch.gather(part, 1, at[rows], out=chosen[rows])
        del part  # before the next one is made
    losses = torch.where(kept, -chosen.squeeze(1), 0.0)
    return losses.sum() if summed else losses


@_losses.register_fake
def _(logits: Tensor, target: Tensor, summed: bool, ignored: int) -> Tensor:
    return logits.new_empty(() if summed else target.shape, dtype=torch.float32)


@torch.library.custom_op("shardwright::half_cross_entropy_backward", mutates_args=())
def _gradient(grad: Tensor, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The gradient of the logits in their dtype, (samples, classes)."""
    kept, at = _labels(target, ignored)
    scale = torch.where(kept, grad, 0.0).unsqueeze(1)
    one = torch.full_like(scale, -1.0)
    found = logits.new_empty(logits.shape)
    for rows in row_parts(*logits.shape):
        part = torch.softmax(logits[rows], 1, dtype=torch.float32)
        part.scatter_add_(1, at[rows], one[rows])
        torch.mul(part, scale[rows], out=found[rows])
        del part
    return found


@_gradient.register_fake
def _(grad: Tensor, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _labels(target: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Whether samples count, (samples), and their classes, (samples, 1), 0 where they do not."""
    kept = target != ignored
    return kept, torch.where(kept, target, 0).unsqueeze(1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, target, ctx.summed, ctx.ignored = inputs
    ctx.save_for_backward(logits, target)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    logits, target = ctx.saved_tensors
    # Autograd enables gradients in a backward pass for a second derivative only, which torch's
    # operators have; a compiler differentiates its graph once.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        whole = aten.cross_entropy_loss.default(
            logits.float(), target, None, _SUM if ctx.summed else _NONE, ctx.ignored
        )
        (found,) = torch.autograd.grad(whole, logits, grad, create_graph=True)
    else:
        found = _gradient(grad, logits, target, ctx.ignored)
    return found, None, None, None


_losses.register_autograd(_backward, setup_context=_keep)

torch.library.define(
    "shardwright::cross_entropy_loss",
    "(Tensor self, Tensor target, Tensor? weight=None, int reduction=1,"
    " SymInt ignore_index=-100, float label_smoothing=0.0) -> Tensor",
)
torch.library.impl(
    "shardwright::cross_entropy_loss", "CompositeImplicitAutograd", cross_entropy_loss
)
