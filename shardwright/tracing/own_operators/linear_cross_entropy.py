"""Projection and cross entropy as one operator, in chunks of the vocabulary.

With x_c the logits of class c, N = log Σ exp(x_c) over all classes and q the target distribution
times the class weights, the loss of a token is Σ q_c (N − x_c). The forward pass adds up N and the
terms chunk by chunk and keeps N; the backward pass computes the logits of a chunk again and from
them their gradients, exp(x_c − N) Σ q − q_c, and the products with hidden states and weight.

Logits have the dtype of the hidden states and are cast to the one in which the model computes its
loss, as in the model. Logits of one chunk exist at a time.

Papers: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Hsu et al.,
"Liger Kernel" (2024), whose chunks are of tokens; Wijmans et al., "Cut Your Losses" (2024).

Importing this file registers `torch.ops.shardwright.linear_cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan, prod
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.tracing.export.kernels import statistics_dtype
from shardwright.tracing.export.second_derivative import refuse_second_derivative
from shardwright.tracing.own_operators.lookup import local_index

# A tensor's sum, or its greatest, over the devices that share the classes.
Reduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LossForm:
    """The arguments of a loss that are no tensors.

    Attributes:
        ignored: the label of targets that do not count.
        smoothing: the part of the target distribution that is spread over all classes.
        chunks: the number of parts of the local classes.
        dtype: the dtype to which logits are cast.
        tile: which classes are here: start, length and size of each atom of their dimension; empty
            if all are.
        reduce: reduces over the devices with the other classes; None if all are here.
    """

    ignored: int
    smoothing: float
    chunks: int
    dtype: torch.dtype
    tile: tuple[int, ...] = ()
    reduce: Reduce | None = None

    def parts(self, classes: int) -> Iterator[slice]:
        """The chunks of the local classes."""
        step = max(1, -(-classes // self.chunks))
        return (slice(start, min(start + step, classes)) for start in range(0, classes, step))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    chunks: int,
    dtype: torch.dtype,
) -> Tensor:
    """The summed cross entropy of `linear(x, weight, bias)`, cast to `dtype`, with `target`.

    x (tokens, width), weight (classes, width), bias and `class_weight` (classes), target (tokens).
    """
    form = LossForm(ignore_index, label_smoothing, chunks, dtype)
    return loss_in_chunks(x, weight, bias, target, class_weight, form)


def loss_in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    form: LossForm,
) -> Tensor:
    """The terms of the local classes; see `linear_cross_entropy`."""
    found: Tensor = _Loss.apply(x, weight, bias, target, class_weight, form)  # type: ignore[no-untyped-call]
    return found


class _Hits(NamedTuple):
    """By token: whether it counts, the local index of its class, whether that is here, its q."""

    kept: Tensor
    at: Tensor
    inside: Tensor
    chosen: Tensor

    def within(self, part: slice) -> tuple[Tensor, Tensor]:
        """Whether the class is in a chunk, and its index there, (tokens, 1)."""
        here = self.inside & (self.at >= part.start) & (self.at < part.stop)
        index = (self.at - part.start).clamp(0, part.stop - part.start - 1)
        return here, index.unsqueeze(1)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        form: LossForm,
    ) -> Tensor:
        hits = _hits(target, class_weight, len(weight), form)
        normalizer, logit, total = _statistics(x, weight, bias, class_weight, hits, form)
        smooth, kept = _smooth(len(weight), form), hits.kept
        terms = hits.chosen * (normalizer - logit).masked_fill(~hits.inside, 0.0)
        mass = kept.to(normalizer.dtype)
        if total is not None:
            every = len(weight) if class_weight is None else class_weight.sum().to(terms.dtype)
            terms = terms + smooth * (every * normalizer - total) * kept
        if class_weight is not None:
            mass = hits.chosen + smooth * class_weight.sum().to(mass.dtype) * kept
            mass = mass if form.reduce is None else form.reduce(mass, "sum")
        classes = prod(form.tile[2::3]) if form.tile else len(weight)
        known = ~kept | ((target >= 0) & (target < classes))
        terms = terms.masked_fill(~known, nan)  # rather than no loss at all
        ctx.form = form
        ctx.save_for_backward(x, weight, bias, target, class_weight, normalizer, mass)
        return terms.sum().to(form.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a loss in chunks", "plan with loss_chunks=1")
        x, weight, bias, target, class_weight, normalizer, mass = ctx.saved_tensors
        form: LossForm = ctx.form
        needs = ctx.needs_input_grad
        scale = grads[0].to(normalizer.dtype)
        hits = _hits(target, class_weight, len(weight), form)
        smooth = _smooth(len(weight), form)
        of_x: Tensor | None = None
        of_weight = torch.empty_like(weight) if needs[1] else None
        of_bias = torch.empty_like(bias) if bias is not None and needs[2] else None
        for part in form.parts(len(weight)):
            logits = _logits(x, weight, bias, part, form)
            here, index = hits.within(part)
            grad = logits.sub_(normalizer.unsqueeze(1)).exp_().mul_((mass * scale).unsqueeze(1))
            grad.scatter_add_(1, index, (-scale * hits.chosen * here).unsqueeze(1))
            if smooth:
                each = (smooth * scale * hits.kept).unsqueeze(1)
                grad.sub_(each if class_weight is None else each * class_weight[part])
            grad = grad.to(form.dtype).to(x.dtype)
            del logits
            if needs[0]:
                of_x = _added(of_x, grad, weight[part], form)
            if of_weight is not None:
                torch.mm(grad.t(), x, out=of_weight[part])
            if of_bias is not None:
                of_bias[part] = grad.sum(0)
            del grad
        return None if of_x is None else of_x.to(x.dtype), of_weight, of_bias, None, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, part: slice, form: LossForm) -> Tensor:
    """The logits of a chunk as the model casts them, at least in float32: a tensor of its own."""
    logits = F.linear(x, weight[part], None if bias is None else bias[part]).to(form.dtype)
    return logits.to(statistics_dtype(logits))


def _hits(target: Tensor, class_weight: Tensor | None, classes: int, form: LossForm) -> _Hits:
    kept = target != form.ignored
    at, inside = local_index(target, form.tile or (0, classes, classes))
    inside = inside & kept
    dtype = torch.float64 if form.dtype == torch.float64 else torch.float32
    chosen = (1.0 - form.smoothing) * inside.to(dtype)
    if class_weight is not None:
        chosen = chosen * class_weight.to(dtype)[at]
    return _Hits(kept, at, inside, chosen)


def _statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    hits: _Hits,
    form: LossForm,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """By token: N, the logit of its class if that is here, and with smoothing Σ w_c x_c."""
    normalizer: Tensor | None = None
    logit = torch.zeros_like(hits.chosen)
    total = torch.zeros_like(hits.chosen) if form.smoothing else None
    for part in form.parts(len(weight)):
        logits = _logits(x, weight, bias, part, form)
        here, index = hits.within(part)
        logit = torch.where(here, logits.gather(1, index).squeeze(1), logit)
        if total is not None:
            w = None if class_weight is None else class_weight[part].to(logits.dtype)
            total = total + (logits.sum(1) if w is None else logits.mv(w))
        largest = _finite(logits.amax(1))
        found = largest + logits.sub_(largest.unsqueeze(1)).exp_().sum(1).log()
        normalizer = found if normalizer is None else torch.logaddexp(normalizer, found)
        del logits
    assert normalizer is not None, "a tile has classes"
    if form.reduce is not None:
        largest = _finite(form.reduce(normalizer, "max"))
        normalizer = largest + form.reduce((normalizer - largest).exp(), "sum").log()
    return normalizer, logit, total


def _finite(largest: Tensor) -> Tensor:
    """`largest` with zero for the maximum of logits that are all minus infinity."""
    return largest.masked_fill(largest == -inf, 0.0)


def _smooth(classes: int, form: LossForm) -> float:
    """The target of each class by label smoothing."""
    return form.smoothing / (prod(form.tile[2::3]) if form.tile else classes)


def _added(total: Tensor | None, grad: Tensor, weight: Tensor, form: LossForm) -> Tensor:
    """`total` plus `grad` · `weight`; several chunks add up at least in float32."""
    if total is None:
        found = grad @ weight
        return found.to(statistics_dtype(found)) if form.chunks > 1 else found
    if total.dtype == grad.dtype:
        return total.addmm_(grad, weight)
    return total.add_(grad @ weight)


torch.library.define(
    "shardwright::linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight,"
    " int ignore_index, float label_smoothing, int chunks, ScalarType dtype) -> Tensor",
)
torch.library.impl(
    "shardwright::linear_cross_entropy", "CompositeImplicitAutograd", linear_cross_entropy
)
