"""Formulas for functions of torch that cannot be traced.

`torch.cov` warns if there are too few observations, and `gaussian_nll_loss` raises for a negative
variance: both branch on a value, which a graph cannot. For a negative variance the result is NaN.
`instance_norm` updates running statistics that its schema does not declare. `embedding_bag`
flattens all its bags into one row, which cannot be split by bags. `ctc_loss` also returns a table
of a size that depends on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.tracing.call import CaptureError
from shardwright.tracing.decompose.tables.ctc import ctc_loss
from shardwright.tracing.own_operators.lookup import MODES, embedding_bags


@final
class Rewritten(TorchFunctionMode):
    """A context in which the functions of this file replace those of torch."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _REWRITTEN.get(func, func)(*args, **(kwargs or {}))


def _covariance(
    x: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """The covariance of the rows of `x`, as `torch.cov`; not finite with too few."""
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    weights = fweights
    if aweights is not None:
        weights = aweights if weights is None else weights * aweights
    weighted = rows if weights is None else rows * weights
    total: Any = rows.shape[1] if weights is None else weights.sum()
    rest = total - correction
    if weights is not None and aweights is not None and correction != 0:
        rest = total - correction * (weights * aweights).sum() / total
    rest = rest.clamp(min=0) if isinstance(rest, Tensor) else rows.new_full((), max(rest, 0))
    mean = (weighted.sum(1) / total).unsqueeze(1)
    centred = rows - mean
    others = centred if weights is None else centred * weights
    return (torch.mm(centred, others.t().conj()) / rest).squeeze()


def _correlation(x: Tensor) -> Tensor:
    """The correlation coefficients of the rows of `x`, as `torch.corrcoef`."""
    found = _covariance(x)
    if found.dim() == 0:
        return found / found
    deviation = torch.sqrt(found.diag().real if found.is_complex() else found.diag())
    found = found / deviation.view(-1, 1) / deviation.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """The loss of `F.gaussian_nll_loss`; NaN where a tensor `var` is negative."""
    if not isinstance(var, Tensor):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = var * torch.ones_like(input)
    if var.size() != input.size():
        if input.size()[:-1] == var.size():
            var = var.unsqueeze(-1)
        elif input.size()[:-1] != var.size()[:-1] or var.size(-1) != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    # As in torch, the clamp is not part of the derivative.
    var = torch.where(var < 0, math.nan, var)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.instance_norm` with updates of the running statistics that a graph can record."""
    if not use_input_stats or running_mean is None or running_var is None:
        return F.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    with torch.no_grad():
        x = input.detach().flatten(2)
        mean = x.sum(2) / x.shape[2]
        squares = (x - mean.unsqueeze(2)).square().sum(2)
        variance = squares / max(1, x.shape[2] - 1)
        for running, one in ((running_mean, mean), (running_var, variance)):
            running.mul_(1 - momentum).add_((one.sum(0) / x.shape[0]).to(running.dtype) * momentum)
    return F.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def _unseen(name: str) -> Callable[..., Tensor]:
    """In-place logical operator `name` that refuses gradients: autograd passes them unchanged."""

    def refuse_gradients(x: Tensor, *args: Any) -> Tensor:
        if x.requires_grad:
            raise CaptureError(
                f"{name}_ writes into a tensor that requires a gradient, unseen by autograd: the"
                f" gradient passes as if nothing was written; use {name}"
            )
        written: Tensor = getattr(Tensor, f"{name}_")(x, *args)
        return written

    return refuse_gradients


_LOGICAL = ("logical_and", "logical_not", "logical_or", "logical_xor")


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag` as an operator whose operands keep one row per bag, for splits."""
    unusual = max_norm is not None or input.is_floating_point() or input.is_nested
    wrong = (
        mode not in MODES or input.dim() not in (1, 2) or (input.dim() == 1) == (offsets is None)
    )
    wrong = wrong or (per_sample_weights is not None and mode != "sum")
    if unusual or wrong:  # torch's own function raises its errors
        return F.embedding_bag(
            input,
            weight,
            offsets,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            per_sample_weights,
            include_last_offset,
            padding_idx,
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    last = include_last_offset and offsets is not None
    number, scale = MODES.index(mode), scale_grad_by_freq
    found: Tensor = embedding_bags(
        weight, input, offsets, per_sample_weights, number, padding, last, scale, []
    )
    return found


_REWRITTEN: dict[Any, Callable[..., Any]] = {
    torch.cov: _covariance,
    torch.Tensor.cov: _covariance,
    torch.corrcoef: _correlation,
    torch.Tensor.corrcoef: _correlation,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.instance_norm: _instance_norm,
    F.embedding_bag: _embedding_bag,
    F.ctc_loss: ctc_loss,
    **{getattr(Tensor, f"{name}_"): _unseen(name) for name in _LOGICAL},
}
