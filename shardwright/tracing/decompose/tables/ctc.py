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
from shardwright.tracing.values.selection import all_true


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
    """`torch.nn.functional.ctc_loss` of a batch; of lengths that are no tensors, torch's own."""
    lengths = (input_lengths, target_lengths)
    tensors = all(isinstance(length, Tensor) for length in lengths)
    if log_probs.dim() == 3 and targets.dim() == 1 and targets.numel() and tensors:
        targets = _padded(targets, target_lengths)
    if log_probs.dim() != 3 or targets.dim() != 2 or not tensors:
        whole: Tensor = F.ctc_loss(
            log_probs, targets, *lengths, blank, reduction, zero_infinity=zero_infinity
        )
        return whole
    losses: Tensor = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        losses = (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == "sum" else losses


def padded_arguments(values: Tensor, mask: Tensor, *args: Any) -> tuple[Any, ...]:
    """Arguments of a CTC loss of the targets `values[mask]`, with padded targets instead.

    The selection has as many elements as the batch has labels, and the padded form always as many.
    """
    if values.dim() != 2 or not isinstance(args[3], Tensor):
        return args
    order = torch.argsort((~mask).to(torch.int64), dim=1, stable=True)
    same = all_true(args[3] == mask.sum(1))
    lengths = torch.where(same, args[3], args[3])
    return (args[0], values.gather(1, order), args[2], lengths, *args[4:])


def _padded(targets: Tensor, lengths: Tensor) -> Tensor:
    """Concatenated targets as rows (N, S), each of which starts with its own."""
    first = lengths.cumsum(0) - lengths
    along = torch.arange(targets.shape[0], device=targets.device)
    return targets[(first[:, None] + along).clamp(max=targets.shape[0] - 1)]
