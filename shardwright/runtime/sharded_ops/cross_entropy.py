"""Vocabulary-parallel cross entropy: logits sharded by class are never gathered.

With x the logits, m their maximum and s = Σ exp(x − m), both over all classes,
the loss of a sample is Σ q (m + log s − x) for a target distribution q times the
class weights: every term belongs to one class, and so to one device. The devices
exchange m and s, one number a sample each (Shoeybi et al., "Megatron-LM", 2019,
section 3); the terms are added up like any other partial sum.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.ir.graph import argument
from shardwright.program.instructions import Joint
from shardwright.rules.operators.half_logits import casts_by_rows, row_parts
from shardwright.tracing.export.operators import to_torch
from shardwright.tracing.export.second_derivative import refuse_second_derivative
from shardwright.tracing.own_operators.lookup import local_index

_NONE, _SUM = 0, 2  # ATen's Reduction enum; means are sums by the time they get here

# A tensor's sum, or its greatest, over the devices that compute the operator together.
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


class TiledCrossEntropy(nn.Module):
    """One `Joint` cross entropy: this device's terms of the loss."""

    def __init__(self, instruction: Joint, reduce: Reduce) -> None:
        super().__init__()
        op = instruction.op
        self.op, self.reduce = op, reduce
        self.tile = tuple(n for atom in instruction.tile for n in atom)
        self.classes = prod(self.tile[2::3])
        self.summed = argument(op, 3, "reduction", 1) == _SUM
        ignored = argument(op, 4, "ignore_index", -100)
        smoothing = argument(op, 5, "label_smoothing", 0.0)
        assert isinstance(ignored, int) and isinstance(smoothing, int | float)
        self.ignored, self.smoothing = ignored, float(smoothing)

    def forward(self, *given: Tensor) -> Tensor:
        """Logits (N, C of this device, ...), targets, class weights if there are any."""
        values = dict(zip(self.op.operands, given, strict=True))
        device = given[0].device
        logits, target, weight = (
            to_torch(argument(self.op, i, name), values, device)
            for i, name in enumerate(("self", "target", "weight"))
        )
        if casts_by_rows(self.op, str(logits.dtype).removeprefix("torch.")):
            by_rows: Tensor = _LossByRows.apply(logits, target, self)  # type: ignore[no-untyped-call]
            return by_rows
        loss: Tensor = _Loss.apply(logits, target, weight, self)  # type: ignore[no-untyped-call]
        return loss

    def extra_repr(self) -> str:
        return f"classes={self.classes}, tile={self.tile}"


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, module: TiledCrossEntropy
    ) -> Tensor:
        ctx.dim = dim = min(1, logits.dim() - 1)
        smooth = module.smoothing / module.classes
        again = bool(smooth) or target.is_floating_point()  # whether all logits are read again
        x = _precise(logits)
        largest = module.reduce(x.amax(dim), "max")
        if not target.is_floating_point():
            kept, at, inside = _hit(target, module, dim)
            own = x.gather(dim, at).squeeze(dim)
        below_largest = _less(x, largest.unsqueeze(dim), in_place=x is not logits and not again)
        total = module.reduce(below_largest.exp_().sum(dim), "sum")
        del below_largest
        normalizer = largest + total.log()
        w = None if weight is None else _along(weight.to(x.dtype), x)
        if target.is_floating_point():
            below = normalizer.unsqueeze(dim) - x  # minus the logarithm of each probability
            wanted = target * (1.0 - module.smoothing) + smooth
            wanted = wanted if w is None else wanted * w
            terms = (wanted * below).sum(dim)
            mass = module.reduce(wanted.sum(dim), "sum")
        else:
            chosen = (1.0 - module.smoothing) * inside.to(x.dtype)
            if weight is not None:
                chosen = chosen * weight.to(x.dtype)[at.squeeze(dim)]
            terms = chosen * (normalizer - own).masked_fill(~inside, 0.0)
            if smooth:
                below = normalizer.unsqueeze(dim) - x
                terms = terms + smooth * (below if w is None else below * w).sum(dim) * kept
            mass = kept.to(x.dtype)
            if weight is not None:
                mass = chosen + smooth * weight.sum().to(x.dtype) * kept
                mass = module.reduce(mass, "sum")
            known = ~kept | ((target >= 0) & (target < module.classes))
            terms = terms.masked_fill(~known, float("nan"))  # rather than no loss at all
        ctx.module = module
        ctx.save_for_backward(logits, target, weight, normalizer, mass)
        return (terms.sum() if module.summed else terms).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        logits, target, weight, normalizer, mass = ctx.saved_tensors
        module, dim = ctx.module, ctx.dim
        x = _precise(logits)
        scale = grads[0].to(x.dtype).expand(normalizer.shape)
        smooth = module.smoothing / module.classes
        w = None if weight is None else _along(weight.to(x.dtype), x)
        again = target.is_floating_point() and ctx.needs_input_grad[1]
        in_place = x is not logits and not again
        grad = _less(x, normalizer.unsqueeze(dim), in_place=in_place).exp_()
        grad.mul_((mass * scale).unsqueeze(dim))
        grad_target = None
        if target.is_floating_point():
            wanted = target * (1.0 - module.smoothing) + smooth
            grad.sub_((wanted if w is None else wanted * w) * scale.unsqueeze(dim))
            if ctx.needs_input_grad[1]:
                below = normalizer.unsqueeze(dim) - x
                below = below * scale.unsqueeze(dim) * (1.0 - module.smoothing)
                grad_target = (below if w is None else below * w).to(target.dtype)
        else:
            kept, at, inside = _hit(target, module, dim)
            chosen = scale * (1.0 - module.smoothing) * inside.to(x.dtype)
            if weight is not None:
                chosen = chosen * weight.to(x.dtype)[at.squeeze(dim)]
            grad.scatter_add_(dim, at, -chosen.unsqueeze(dim))
            if smooth:
                each = (smooth * scale * kept).unsqueeze(dim)
                grad.sub_(each if w is None else each * w)
        return grad.to(logits.dtype), grad_target, None, None


class _LossByRows(torch.autograd.Function):
    """The loss in float32 of half-precision logits, (N, C of this device), cast by some rows."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, module: TiledCrossEntropy) -> Tensor:
        kept, at, inside = _hit(target, module, 1)
        largest = module.reduce(logits.amax(1).float(), "max")
        total = torch.empty_like(largest)
        for rows in row_parts(*logits.shape):
            part = (logits[rows] - largest[rows].unsqueeze(1)).exp_()
            torch.sum(part, 1, out=total[rows])
            del part  # before the next one is made
        normalizer = largest + module.reduce(total, "sum").log()
        own = logits.gather(1, at).squeeze(1).float()
        terms = (normalizer - own).masked_fill(~inside, 0.0)
        known = ~kept | ((target >= 0) & (target < module.classes))
        terms = terms.masked_fill(~known, float("nan"))  # rather than no loss at all
        ctx.module = module
        ctx.save_for_backward(logits, target, normalizer)
        return terms.sum() if module.summed else terms

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative()
        logits, target, normalizer = ctx.saved_tensors
        kept, at, inside = _hit(target, ctx.module, 1)
        scale = torch.where(kept, grads[0], 0.0).unsqueeze(1)
        one = -inside.to(scale.dtype).unsqueeze(1)
        found = logits.new_empty(logits.shape)
        for rows in row_parts(*logits.shape):
            part = (logits[rows] - normalizer[rows].unsqueeze(1)).exp_()
            part.scatter_add_(1, at[rows], one[rows])
            torch.mul(part, scale[rows], out=found[rows])
            del part
        return found, None, None


def _refuse_second_derivative() -> None:
    refuse_second_derivative("cross entropy over a split vocabulary", "plan with its classes whole")


def _hit(target: Tensor, module: TiledCrossEntropy, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The samples that count, the index of their class in this tile, and whether it is in it."""
    kept = target != module.ignored
    at, inside = local_index(target, module.tile)
    return kept, at.unsqueeze(dim), inside & kept


def _less(x: Tensor, other: Tensor, *, in_place: bool) -> Tensor:
    return x.sub_(other) if in_place else x - other


def _precise(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _along(weight: Tensor, x: Tensor) -> Tensor:
    """(C) as it broadcasts against x (N, C, ...) or (C)."""
    return weight.view(-1, *(1,) * max(0, x.dim() - 2))
