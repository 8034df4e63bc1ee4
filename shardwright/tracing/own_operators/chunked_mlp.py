"""An MLP as one operator, in chunks of rows.

With products p_i = x·W_iᵀ + b_i of the input and a function f of them, element by element, the
result is f(p_1, …)·Dᵀ + d. The forward pass computes it for one chunk of rows after the other and
keeps x and the weights alone. The backward pass computes the products of a chunk and f again and at
once the chunk's gradients. So tensors of the inner width exist for one chunk at a time.

Chunks are of rows, so results and the gradient of x are those of the whole MLP, row by row.
Gradients of weights are sums over chunks, at least in float32. Dropout inside is drawn by the index
of each element, so a chunk draws its part, and again in the backward pass.

Papers: Rajbhandari et al., "ZeRO-Infinity" (2021), tiles of large operators; Bekman et al., "Arctic
Long Sequence Training" (2025), MLPs in tiles of the sequence.

Importing this file registers `torch.ops.shardwright.chunked_mlp`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.tracing.export.kernels import statistics_dtype
from shardwright.tracing.export.second_derivative import refuse_second_derivative
from shardwright.tracing.own_operators.experts import run_steps
from shardwright.tracing.own_operators.index_hash import bits_of, threshold_of


@dataclass(frozen=True, slots=True, eq=False)
class _Form:
    """The arguments of an MLP that are no tensors.

    Attributes:
        products: the number of products of the input.
        turned: of each of their weights and that of the last product, whether it is (out, in).
        chunks: the number of parts of the local rows.
        steps: what is between the products, numbered as in `expert_steps.py`.
        draws: keys of the rows, of the inner features and of the operator that its dropout draws by
            (`index_hash.py`); empty: nothing is dropped.
    """

    products: int
    turned: Sequence[bool]
    chunks: int
    steps: Sequence[Any]
    draws: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        products: int,
        turned: Sequence[bool],
        chunks: int,
        between: str,
        _number: int = 0,
        draws: Sequence[Tensor] | None = None,
    ) -> Self:
        """The form that is given by the last arguments of the operator."""
        return cls(products, turned, chunks, json.loads(between), draws or ())

    def inner(self, products: Sequence[Tensor], part: slice) -> Tensor:
        """The factor of the last product, from the first products of a chunk of rows."""
        if not self.draws:
            return run_steps(self.steps, *products)
        rows, columns, key = self.draws
        drop = partial(_dropped, rows[part], columns, key)
        return run_steps(self.steps, *products, drop=drop)

    def parts(self, rows: int) -> Iterator[slice]:
        """The chunks of the local rows."""
        step = max(1, -(-rows // self.chunks))
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def out_in(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The weights as (out, in)."""
        return [w if turned else w.t() for w, turned in zip(weights, self.turned, strict=True)]


def chunked_mlp(
    x: Tensor,
    ups: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    down: Tensor,
    down_bias: Tensor | None,
    *how: Any,
) -> Tensor:
    """The MLP of each row: (..., width) -> (..., width of the result).

    x is (..., width). Each of `ups` is (inner, width), with one of `biases` (inner) or None, and
    `down` is (out, inner), each transposed where its `turned` is False; `down_bias` (out).
    `how` is `turned`, of the products and then of the last one, the number of chunks, and JSON with
    the steps from the products, numbered from 0, to what `down` multiplies. With dropout among them
    the number of that among operators that draw may follow, and the int32 keys of rows, inner
    features and operator that it draws by, without which nothing is dropped.
    """
    form = _Form.of(len(ups), *how)
    found: Tensor = _Mlp.apply(x, down, down_bias, form, *ups, *biases)  # type: ignore[no-untyped-call]
    return found


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        down_bias: Tensor | None,
        form: _Form,
        *ups_and_biases: Tensor | None,
    ) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(x, down, *ups_and_biases)
        *ups, last = form.out_in([*_given(ups_and_biases[: form.products]), down])
        rows = x.reshape(-1, x.shape[-1])
        found = x.new_empty((len(rows), len(last)))
        for part in form.parts(len(rows)):
            products = _products(rows[part], ups, ups_and_biases[form.products :])
            inner = form.inner(products, part)
            del products
            if down_bias is None:
                torch.mm(inner, last.t(), out=found[part])
            else:
                torch.addmm(down_bias, inner, last.t(), out=found[part])
            del inner
        return found.view(*x.shape[:-1], len(last))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("an MLP in chunks", "plan with mlp_chunks=1")
        x, down, *ups_and_biases = ctx.saved_tensors
        form: _Form = ctx.form
        of_x, of_down, of_down_bias, _, *of_others = ctx.needs_input_grad
        *ups, last = form.out_in([*_given(ups_and_biases[: form.products]), down])
        biases = ups_and_biases[form.products :]
        rows, grad = x.reshape(-1, x.shape[-1]), grads[0].reshape(-1, len(last))
        sums = [_Sum(form.chunks) for _ in of_others]  # of the weights, then of their biases
        sum_of_down = _Sum(form.chunks)
        found = torch.empty_like(rows) if of_x else None
        for part in form.parts(len(rows)):
            products = [p.requires_grad_() for p in _products(rows[part], ups, biases)]
            with torch.enable_grad():
                inner = form.inner(products, part)
            of_inner = grad[part] @ last
            if of_down:
                sum_of_down.add_product(grad[part], inner.detach(), turned=form.turned[-1])
            of_products = _of_products(inner, products, of_inner)
            del products, inner, of_inner
            for i, of_product in enumerate(of_products):
                if of_others[i]:
                    sums[i].add_product(of_product, rows[part], turned=form.turned[i])
                if of_others[form.products + i]:
                    sums[form.products + i].add(of_product.sum(0))
                if found is not None and i == 0:
                    torch.mm(of_product, ups[i], out=found[part])
                elif found is not None:
                    found[part].addmm_(of_product, ups[i])
            del of_product, of_products
        of_weights = (one.found(x.dtype) for one in (sum_of_down, *sums))
        first, *rest = of_weights
        of_result = grad.sum(0) if of_down_bias else None
        return None if found is None else found.view(x.shape), first, of_result, None, *rest


def _of_products(inner: Tensor, products: list[Tensor], of_inner: Tensor) -> list[Tensor]:
    """Gradients of the products; zeros for one that only comparisons read."""
    if not inner.requires_grad:
        return [torch.zeros_like(one) for one in products]
    found = torch.autograd.grad(inner, products, of_inner, materialize_grads=True)
    return list(found)


class _Sum:
    """A sum over chunks, at least in float32 if there are several."""

    def __init__(self, chunks: int) -> None:
        self._several = chunks > 1
        self._total: Tensor | None = None

    def add(self, one: Tensor) -> None:
        """Add a tensor."""
        if self._total is None:
            self._total = one.to(statistics_dtype(one)) if self._several else one
        else:
            self._total.add_(one)

    def add_product(self, grad: Tensor, given: Tensor, *, turned: bool) -> None:
        """Add the gradient of a weight: of (rows, out) and (rows, in), (out, in) if `turned`."""
        left, right = (grad, given) if turned else (given, grad)
        if self._total is not None and self._total.dtype == grad.dtype:
            self._total.addmm_(left.t(), right)
        else:
            self.add(left.t() @ right)

    def found(self, dtype: torch.dtype) -> Tensor | None:
        """The sum, rounded to `dtype`; None if nothing was added."""
        total, self._total = self._total, None
        return None if total is None else total.to(dtype)


def _dropped(rows: Tensor, columns: Tensor, key: Tensor, x: Tensor, probability: float) -> Tensor:
    """Dropout of a chunk by int32 keys of its rows, of its columns and of the operator."""
    keep = bits_of(rows, columns, key) >= threshold_of(probability)
    return torch.where(keep.view(x.shape), x * (1.0 / (1.0 - probability)), 0.0)


def _products(rows: Tensor, ups: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    return [F.linear(rows, up, bias) for up, bias in zip(ups, biases, strict=True)]


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [one for one in tensors if one is not None]


torch.library.define(
    "shardwright::chunked_mlp",
    "(Tensor x, Tensor[] ups, Tensor?[] biases, Tensor down, Tensor? down_bias, bool[] turned,"
    " int chunks, str between, int number=0, Tensor[]? draws=None) -> Tensor",
)
torch.library.impl("shardwright::chunked_mlp", "CompositeImplicitAutograd", chunked_mlp)
