"""Rewrites random operators as arithmetic on uniform random numbers.

Random numbers must not depend on the plan. So these operators become `shardwright.uniform`, for
which the runtime draws numbers by the index of the element, and arithmetic. Dropout is kept as an
operator of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.tracing.export import kernels

aten: Any = torch.ops.aten

_NUMBER = -1  # the graph builder replaces it by the number of the draw


def _uniform(
    size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    device = torch.device(device) if device is not None else torch.get_default_device()
    drawn: Tensor = kernels.uniform(list(size), _NUMBER, dtype=dtype, device=device)
    return drawn


def _normal(
    size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor:
    """Standard normal numbers, by the Box-Muller transform of two uniform draws."""
    radius = torch.sqrt(-2.0 * torch.log1p(-_uniform(size, dtype, device)))
    return radius * torch.cos(2.0 * math.pi * _uniform(size, dtype, device))


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def decomposed(
        x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Tensor:
        return draw(x.shape, dtype or x.dtype, x.device if device is None else device)

    return decomposed


def _integers(
    low: int, high: int, size: Sequence[int], *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    drawn = _uniform(size, torch.float64, device) * (high - low)
    return drawn.floor().to(dtype or torch.int64) + low


def _integers_below(high: int, size: Sequence[int], **options: Any) -> Tensor:
    return _integers(0, high, size, **options)


def _integers_like(x: Tensor, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(0, high, x.shape, dtype=dtype or x.dtype, device=x.device)


def _integers_like_from(x: Tensor, low: int, high: int, *, dtype: Any = None, **_: Any) -> Tensor:
    return _integers(low, high, x.shape, dtype=dtype or x.dtype, device=x.device)


def _permutation(n: int, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return torch.argsort(_uniform([n], torch.float64, device)).to(dtype or torch.int64)


def _bernoulli(probability: Tensor, *, generator: Any = None) -> Tensor:
    drawn = _uniform(probability.shape, probability.dtype, probability.device)
    return (drawn < probability).to(probability.dtype)


def _bernoulli_p(x: Tensor, p: float = 0.5, *, generator: Any = None) -> Tensor:
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return (_uniform(x.shape, dtype, x.device) < p).to(x.dtype)


def _uniform_between(
    x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None
) -> Tensor:
    return _uniform(x.shape, x.dtype, x.device) * (high - low) + low


def _normal_around(
    x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
) -> Tensor:
    return _normal(x.shape, x.dtype, x.device) * std + mean


def _exponential(x: Tensor, rate: float = 1.0, *, generator: Any = None) -> Tensor:
    return -torch.log1p(-_uniform(x.shape, x.dtype, x.device)) * (1.0 / rate)


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator."""
    return {
        aten.rand.default: _uniform,
        aten.rand_like.default: _like(_uniform),
        aten.randn.default: _normal,
        aten.randn_like.default: _like(_normal),
        aten.randint.default: _integers_below,
        aten.randint.low: _integers,
        aten.randint_like.default: _integers_like,
        aten.randint_like.low_dtype: _integers_like_from,
        aten.randperm.default: _permutation,
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.p: _bernoulli_p,
        aten.uniform.default: _uniform_between,
        aten.normal_functional.default: _normal_around,
        aten.exponential.default: _exponential,
    }
