"""Packs the values that a stage sends, of any shape and dtype, into one tensor.

`torch.distributed.pipelining` wants tensors of one shape in every micro-batch,
each with a gradient of its own shape. Micro-batches differ in size and not all
values have a gradient, so a stage packs what it hands on into one flat float32
tensor of the size of the largest micro-batch. It is never computed with: its
numbers are the bytes of the values, and those of its gradient the bytes of
their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch

from shardwright.program.lower.pipeline import Crossing

_ALIGN = 64  # bytes: values start where vector instructions like them to
_WORD = 4  # bytes of a float32


@dataclass(frozen=True)
class Form:
    """How values lie in a message of `words` float32."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    words: int

    @classmethod
    def of(cls, values: Sequence[Crossing], words: int = 0) -> Form:
        """The form of a message of `values`, at least `words` long."""
        shapes = tuple(value.shape for value in values)
        dtypes: tuple[torch.dtype, ...] = tuple(getattr(torch, value.dtype) for value in values)
        end = _starts(shapes, dtypes)[-1]
        flags = tuple(value.differentiable for value in values)
        return cls(shapes, dtypes, flags, max(end // _WORD, words, 1))

    def views(self, message: torch.Tensor) -> list[torch.Tensor]:
        """The values in a message, sharing its memory."""
        raw = message.view(torch.uint8)
        return [
            raw[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, shape, dtype in zip(
                _starts(self.shapes, self.dtypes), self.shapes, self.dtypes, strict=False
            )
        ]

    def pack(self, values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A message of `values` of this form."""
        anchor = torch.zeros((), device=device, requires_grad=True)  # a message has a gradient
        message: torch.Tensor = _Pack.apply(self, anchor, *values)  # type: ignore[no-untyped-call]
        return message

    def unpack(self, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The values of a message of this form."""
        values: tuple[torch.Tensor, ...] = _Unpack.apply(self, message)  # type: ignore[no-untyped-call]
        return values

    def _written(
        self, tensors: Sequence[torch.Tensor | None], device: torch.device
    ) -> torch.Tensor:
        message = torch.zeros(self.words, dtype=torch.float32, device=device)
        for view, tensor in zip(self.views(message), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        return message


def _starts(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> list[int]:
    """The byte at which each value starts, and where the last one ends."""
    sizes = (
        -(-prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return list(accumulate(sizes, initial=0))


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, anchor: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        ctx.form = form
        return form._written(values, anchor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        form: Form = ctx.form
        # Of their own, as the message is overwritten by that of the next step.
        views = form.views(grads[0].contiguous().clone())
        found = (v if d else None for v, d in zip(views, form.differentiable, strict=True))
        return (None, None, *found)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: Form, message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.device = form, message.device
        values = tuple(form.views(message))
        flags = zip(values, form.differentiable, strict=True)
        ctx.mark_non_differentiable(*(value for value, flag in flags if not flag))
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, torch.Tensor]:
        form: Form = ctx.form
        return None, form._written(grads, ctx.device)
