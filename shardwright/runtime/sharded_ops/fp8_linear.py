"""Linear layers whose products, forward and for both gradients, are in 8 bits.

Each product multiplies two matrices whose last dimension is contracted. Before it each is scaled so
that its largest element is the largest number of its format, and cast:

* `tensorwise`: one scale for a matrix; operands in e4m3, gradients of results in e5m2;
* `rowwise`: one scale for each row, rounded down to a power of two; all in e4m3.

These are the recipes of torchao's training (`torchao.float8.Float8LinearConfig.from_recipe_name`),
with which results and gradients agree to the bit. Scales are found anew in every product. Sums are
in float32; those of the result may be summed in fewer bits on GPUs, as torchao lets them.

A rank scales the tiles that it holds. So a scale is that of one device unless the dimensions over
which its maximum goes are split: of `rowwise` the contracted one, of `tensorwise` any.

Paper: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.ir.options.fp8 import FLOAT8, recipe_of
from shardwright.ir.plan import PlanError
from shardwright.rules.operators.fp8_layers import MULTIPLE
from shardwright.tracing.export.second_derivative import refuse_second_derivative

_LEAST = 1e-12  # the smallest maximum: a matrix of zeros has a scale, too


def require_8_bit(device: torch.device) -> None:
    """Raise `PlanError` for a GPU that does not multiply e4m3 as OCP has it."""
    if device.type != "cuda":
        return
    if torch.version.hip is None:
        multiplies = torch.cuda.get_device_capability(device) >= (8, 9)
    else:  # MI300 has a format with other numbers, and those before none
        kind = torch.cuda.get_device_properties(device).gcnArchName
        multiplies = kind.startswith(("gfx95", "gfx12"))
    if not multiplies:
        raise PlanError(
            f"{torch.cuda.get_device_name(device)} has no products in {FLOAT8}, which the plan"
            " needs; plan without fp8, or run it on GPUs of Ada, Hopper, Blackwell or MI350"
        )


class Fp8Linear(nn.Module):
    """A linear layer on this rank's tiles; it takes the arguments of `torch.nn.functional.linear`.

    `key` is that of an executed recipe (`ir/options/fp8.py`).
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        recipe = recipe_of(key)
        assert recipe is not None and recipe.is_executed, f"{key} is not executed"
        self.recipe = recipe.name

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The result of x (..., width) and weight (out, width), (..., out), in the dtype of x."""
        found: Tensor = _Linear.apply(x, weight, self.recipe == "rowwise")  # type: ignore[no-untyped-call]
        return found if bias is None else found + bias.to(found.dtype)

    def extra_repr(self) -> str:
        return self.recipe


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows = by_rows
        given = _cast(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn, by_rows)
        found = _product(given, _cast(weight, torch.float8_e4m3fn, by_rows), x.dtype, fast=True)
        return found.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        refuse_second_derivative("a product in 8 bits", "plan without fp8")
        x, weight = ctx.saved_tensors
        by_rows: bool = ctx.by_rows
        of_gradients = torch.float8_e4m3fn if by_rows else torch.float8_e5m2
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, len(weight))
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            back = _cast(grad, of_gradients, by_rows)
            turned = _cast(weight.t(), torch.float8_e4m3fn, by_rows)
            of_x = _product(back, turned, x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            # Kernels want multiples of 16, which a number of rows need not be. Zeros add nothing.
            more = (0, 0, 0, -len(rows) % MULTIPLE)
            back = _cast(F.pad(grad, more).t(), of_gradients, by_rows)
            given = _cast(F.pad(rows, more).t(), torch.float8_e4m3fn, by_rows)
            of_weight = _product(back, given, x.dtype)
        return of_x, of_weight, None


class _Cast(NamedTuple):
    """A matrix in 8 bits (rows, contracted), and what it is to be multiplied with.

    `scale` is float32 (rows, 1), or of no dimension.
    """

    bits: Tensor
    scale: Tensor


def _cast(x: Tensor, dtype: torch.dtype, by_rows: bool) -> _Cast:
    most = torch.finfo(dtype).max
    largest = x.abs().amax(-1, keepdim=True) if by_rows else x.abs().max()
    # In float64, where eager and compiled code divide alike.
    scale = (most / largest.double().clamp(min=_LEAST)).float()
    if by_rows:
        scale = scale.log2().floor().exp2()
    bits = (x.float() * scale).clamp(-most, most).to(dtype)  # casts do not saturate in torch 2.11
    return _Cast(bits.contiguous(), scale.reciprocal())


def _product(left: _Cast, right: _Cast, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """The product of `left` and `right` transposed, (rows of left, rows of right).

    Scales of rows are multiplied with the result unless the product is `fast`, as kernels that do
    so themselves are slow at exact sums; scales are powers of two, so nothing is rounded again. The
    product is then in bfloat16 in any case, the one dtype that kernels for rows have.
    """
    by_rows = left.scale.dim() > 0
    if not by_rows or fast:
        one = F.ScalingType.RowWise if by_rows else F.ScalingType.TensorWise
        scales = left.scale, one, right.scale.t(), one
    else:
        unit, one = left.scale.new_ones(()), F.ScalingType.TensorWise
        scales = unit, one, unit, one
    found = F.scaled_mm(
        left.bits,
        right.bits.t(),
        *scales,
        output_dtype=torch.bfloat16 if by_rows else dtype,
        use_fast_accum=fast,
    )
    if by_rows and not fast:
        found = found.mul_(left.scale).mul_(right.scale.t())
    return found.to(dtype)
