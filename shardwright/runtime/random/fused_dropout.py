"""Dropout in one kernel on a GPU: the mask is computed, not read, in both passes.

Operator by operator a mask takes some thirty small kernels and ten passes over memory. Compiled, it
is one kernel that reads the tensor and writes the result, as torch's own dropout. The gradient is
the same function of the result's gradient, so nothing is saved for it but keys.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from shardwright.tracing.own_operators.index_hash import bits_of

Drop = Callable[..., torch.Tensor]


def is_fused(x: torch.Tensor) -> bool:
    """Whether dropout of `x` runs as one kernel: on a GPU, where torch can compile kernels.

    A compiler that traces the call fuses the plain operators itself.
    """
    return x.is_cuda and not torch.compiler.is_compiling() and _has_triton()


def fused_dropout(x: torch.Tensor, *how: Any) -> torch.Tensor:
    """`dropped(x, *how)` in one kernel, differentiable any number of times."""
    return _Dropout.apply(x, *how)  # type: ignore[no-any-return, no-untyped-call]


def dropped(
    x: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    key: torch.Tensor,
    threshold: int,
    scale: float,
) -> torch.Tensor:
    """`x` times `scale` where the element's bits reach the threshold, else zero.

    Args:
        x: the tile.
        rows, columns: int32 keys of its rows and of its columns.
        key: int32 [], of the operator that draws, in this step.
        threshold: the least int32 that is kept.
        scale: of what is kept.
    """
    keep = bits_of(rows, columns, key) >= threshold
    return torch.where(keep.view(x.shape), x * scale, 0.0)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        tensors, ctx.numbers = how[:3], how[3:]
        ctx.save_for_backward(*tensors)
        return compiled()(x, *how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        how = (*ctx.saved_tensors, *ctx.numbers)
        return fused_dropout(gradient, *how), *(None for _ in how)


@functools.cache
def compiled() -> Drop:
    """The kernel; one is made for each shape, dtype and probability."""
    return torch.compile(dropped)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
