"""Memory of `torch.nn.functional.rms_norm` on accelerators, what it allocates and saves.

There it is one kernel (`aten::_fused_rms_norm`) if the weight has the input's dtype; its backward
pass reads input, weight, and the reciprocal norm of each row. On CPUs and meta tensors torch runs
single operators, which save copies in float32. The stand-in allocates what the kernel does and
computes nothing; graphs never have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.ir.graph import Op
from shardwright.tracing.export.operators import python_operator

_STAND_IN = "shardwright.fused_rms_norm.meta"


def on_accelerators(op: Op, dtypes: Sequence[str]) -> Op:
    """`op`, or the stand-in for it where accelerators have a kernel; `dtypes` of its operands."""
    fused = op.kind == "rms_norm" and len({*dtypes}) == 1 and not dtypes[0].startswith("complex")
    return replace(op, target=_STAND_IN) if fused else op


@python_operator(_STAND_IN)
def _fused(
    x: Tensor, sizes: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    out: Tensor = _Kernel.apply(x, len(sizes), weight)  # type: ignore[no-untyped-call]
    return out


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        norms = x.new_empty(x.shape[: x.dim() - dims], dtype=wide)
        ctx.save_for_backward(x, norms, *(() if weight is None else (weight,)))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, _, *weight = ctx.saved_tensors
        wanted, _, by_weight = ctx.needs_input_grad
        return (
            torch.empty_like(x) if wanted else None,
            None,
            torch.empty_like(weight[0]) if weight and by_weight else None,
        )
