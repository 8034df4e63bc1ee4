"""Largest and smallest elements, products and logarithms of sums of exponentials, over devices.

The devices with tiles of the operand exchange a few numbers per result. The result is returned as a
partial sum: the whole result on the first device and zeros on the others. Gradients equal torch's:
that of a maximum is divided among all elements that attain it, on all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.program.instructions import Joint
from shardwright.rules.operators.reductions import reduced_dims
from shardwright.runtime.sharded_ops.chunked import TiledChunkedLoss
from shardwright.runtime.sharded_ops.cross_entropy import TiledCrossEntropy
from shardwright.tracing.export.kernels import statistics_dtype
from shardwright.tracing.export.second_derivative import refuse_second_derivative

# A tensor's "sum", "product", "max" or "min" over the devices that compute the operator together.
Reduce = Callable[[Tensor, str], Tensor]


def joint(instruction: Joint, reduce: Reduce) -> nn.Module:
    """The module that runs an operator that devices compute together."""
    losses = {"cross_entropy_loss": TiledCrossEntropy, "linear_cross_entropy": TiledChunkedLoss}
    return losses.get(instruction.op.kind, TiledReduction)(instruction, reduce)


class TiledReduction(nn.Module):
    """One `Joint` reduction: this device's term of the result."""

    def __init__(self, instruction: Joint, reduce: Reduce) -> None:
        super().__init__()
        self.op, self.first, self.reduce = instruction.op, instruction.first, reduce
        self.shape = instruction.shapes[0]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _BY_KIND[self.op.kind].apply(x, self)
        return result

    def dims(self, x: Tensor) -> list[int]:
        return sorted(reduced_dims(self.op, x.dim()))

    def term(self, whole: Tensor) -> Tensor:
        """`whole`, which has all dimensions of the operand, as a term of the result's shape."""
        whole = whole.reshape(self.shape)
        return whole if self.first else torch.zeros_like(whole)

    def extra_repr(self) -> str:
        return f"{self.op.kind}, first={self.first}"


class _Extremum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: TiledReduction) -> Tensor:
        dims, largest = reduction.dims(x), reduction.op.kind in ("max", "amax")
        sign = 1.0 if largest else -1.0
        unknown = x.isnan()
        known = x.masked_fill(unknown, -sign * inf)
        if x.numel():
            own = known.amax(dims, True) if largest else known.amin(dims, True)
        else:
            own = x.new_full(_kept(x, dims), -sign * inf)
        # A maximum over numbers and NaN may return either, so NaN has a flag of its own.
        flags = sign * (unknown.sum(dims, True) > 0).to(x.dtype)
        value, wrong = reduction.reduce(torch.stack([own, flags]), "max" if largest else "min")
        value = value.masked_fill(wrong != 0, nan)
        hit = x == value
        if reduction.op.kind in ("max", "min"):  # as torch's, which differ in that
            hit = hit | (unknown & value.isnan())
        count = reduction.reduce(hit.sum(dims, True).to(statistics_dtype(x)), "sum")
        ctx.save_for_backward(hit, count)
        return reduction.term(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        hit, count = ctx.saved_tensors
        return hit * (grad.reshape(count.shape) / count).to(grad.dtype), None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: TiledReduction) -> Tensor:
        dims, wide = reduction.dims(x), x.to(statistics_dtype(x))
        own = wide.amax(dims, True) if x.numel() else wide.new_full(_kept(x, dims), -inf)
        largest = reduction.reduce(own, "max")
        largest = largest.masked_fill(~largest.isfinite(), 0.0)
        total = reduction.reduce((wide - largest).exp_().sum(dims, True), "sum")
        value = largest + total.log()
        ctx.save_for_backward(x, value)
        return reduction.term(value.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        x, value = ctx.saved_tensors
        found = (x.to(value.dtype) - value).exp_().mul_(grad.reshape(value.shape))
        return found.to(x.dtype), None


class _Product(torch.autograd.Function):
    """Product; with one zero only that element has a gradient, with several zeros none has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduction: TiledReduction) -> Tensor:
        dims, zero = reduction.dims(x), x == 0
        terms = torch.stack([_product(x, dims), _product(x.masked_fill(zero, 1.0), dims)])
        value, others = reduction.reduce(terms, "product")
        zeros = reduction.reduce(zero.sum(dims, True).to(statistics_dtype(x)), "sum")
        ctx.save_for_backward(x, value, others, zeros)
        return reduction.term(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        x, value, others, zeros = ctx.saved_tensors
        alone = torch.where(x == 0, others, 0.0)
        found = torch.where(zeros == 0, value / x, torch.where(zeros == 1, alone, 0.0))
        return found * grad.reshape(value.shape), None


def _refuse_second_derivative() -> None:
    refuse_second_derivative("a reduction over devices", "plan with what it reduces whole")


def _product(x: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        x = x.prod(dim, True)
    return x


def _kept(x: Tensor, dims: list[int]) -> list[int]:
    return [1 if dim in dims else size for dim, size in enumerate(x.shape)]


_BY_KIND: dict[str, type[torch.autograd.Function]] = {
    **dict.fromkeys(("max", "min", "amax", "amin"), _Extremum),
    "logsumexp": _LogSumExp,
    "prod": _Product,
}
