"""Connectionist temporal classification, with one term per sample.

Torch's operator returns a table whose size is the longest target, which only values tell, so no
graph can hold it. Here it is an operator that returns the losses only and computes the table again
in the backward pass. Samples are independent.

Importing this file registers `torch.ops.shardwright.ctc_losses`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.tracing.export.second_derivative import refuse_second_derivative


@torch.library.custom_op("shardwright::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` of each sample: (N).

    `log_probs` are (T, N, C), padded `targets` (N, S), both lengths (N).
    """
    return _losses(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


@ctc_losses.register_fake
def _(log_probs: Tensor, targets: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty((log_probs.shape[1],))


def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    with torch.backends.cudnn.flags(enabled=False):  # its kernel takes no padded targets
        lengths = (input_lengths, target_lengths)
        found: Tensor = F.ctc_loss(log_probs, targets, *lengths, blank, "none", zero_infinity)
        return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.blank, ctx.zero_infinity = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    refuse_second_derivative("the CTC loss", "take another loss")
    log_probs, targets, *lengths = ctx.saved_tensors
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        losses = _losses(log_probs, targets, lengths[0], lengths[1], ctx.blank, ctx.zero_infinity)
    (found,) = torch.autograd.grad(losses, log_probs, grad)
    return found, None, None, None, None, None


ctc_losses.register_autograd(_backward, setup_context=_keep)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` of a batch; of anything but padded targets, torch's own."""
    lengths = (input_lengths, target_lengths)
    tensors = all(isinstance(length, Tensor) for length in lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not tensors:
        whole: Tensor = F.ctc_loss(
            log_probs, targets, *lengths, blank, reduction, zero_infinity=zero_infinity
        )
        return whole
    losses: Tensor = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        losses = (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses


def padded(values: Tensor, mask: Tensor) -> Tensor:
    """The elements (N, S) of `values` where `mask` is True, in the same rows but at their start."""
    order = torch.argsort((~mask).to(torch.int64), dim=1, stable=True)
    found: Tensor = values.gather(1, order)
    return found
