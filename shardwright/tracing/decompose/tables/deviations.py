"""Decomposes variances, standard deviations and vector norms (p = 1 and 2) into sums.

An operator that reduces all dimensions cannot be split; a sum can. Reductions over some dimensions
are unchanged, because the others can be split. Only float32 and float64 are decomposed: torch
accumulates lower precisions in higher ones. At zero, deviations and norms have the gradient zero,
as in torch, whereas that of a plain square root is infinite.

`aminmax` is decomposed into `amin` and `amax`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten

_FLOAT32_UP = (torch.float32, torch.float64)


def _sum(x: Tensor, dim: list[int] | None, keepdim: bool) -> Tensor:
    total: Tensor = aten.sum.dim_IntList(x, dim or None, keepdim)
    return total


def _root(x: Tensor) -> Tensor:
    """The square root with gradient zero at zero."""
    zero = x == 0
    return x.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)


def _moments(finish: Callable[[Tensor], Tensor], with_mean: bool) -> Callable[..., Any]:
    def decomposed(
        x: Tensor,
        dim: list[int] | None = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        if x.dtype not in _FLOAT32_UP or x.dim() == 0 or x.numel() == 0:
            return NotImplemented
        first = _sum(x, dim, True)
        if first.numel() > 1:
            return NotImplemented
        count = x.numel()
        freedom = count - (1 if correction is None else correction)
        if freedom <= 0:
            return NotImplemented
        # The second sum corrects the rounding of the mean: equal elements then deviate by zero.
        mean = first / count
        mean = mean + _sum(x - mean, dim, True) / count
        deviation = x - mean
        spread = finish(_sum(deviation * deviation, dim, keepdim) / freedom)
        return (spread, mean.reshape(spread.shape)) if with_mean else spread

    return decomposed


def _unbiased(of: Callable[..., Any]) -> Callable[..., Any]:
    """The overload with `unbiased` instead of `correction`."""

    def decomposed(
        x: Tensor, dim: list[int] | None, unbiased: bool = True, keepdim: bool = False
    ) -> Any:
        return of(x, dim, correction=int(unbiased), keepdim=keepdim)

    return decomposed


def _norm(
    x: Tensor,
    p: float | None = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if p not in (1, 2) or dtype is not None or x.dtype not in _FLOAT32_UP or x.numel() < 2:
        return NotImplemented
    total = _sum(x.abs() if p == 1 else x * x, dim, keepdim)
    if total.numel() > 1:
        return NotImplemented
    return total if p == 1 else _root(total)


def _same(x: Tensor) -> Tensor:
    return x


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = [] if dim is None else [dim]
    return aten.amin.default(x, dims, keepdim), aten.amax.default(x, dims, keepdim)


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator."""
    moments = {
        aten.var: _moments(_same, False),
        aten.std: _moments(_root, False),
        aten.var_mean: _moments(_same, True),
        aten.std_mean: _moments(_root, True),
    }
    return {
        **{operator.correction: made for operator, made in moments.items()},
        **{operator.dim: _unbiased(made) for operator, made in moments.items()},
        aten.linalg_vector_norm.default: lambda x, ord=2, *a, **k: _norm(x, ord, *a, **k),
        aten.norm.Scalar: _norm,
        aten.norm.ScalarOpt_dim: _norm,
        aten.aminmax.default: _aminmax,
    }
