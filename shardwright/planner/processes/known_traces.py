"""Restricts a tracer of operator memory to the calls that are traced already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shardwright.ir.graph import Op
from shardwright.ir.op_memory import (
    BackwardMemory,
    CallMemory,
    ForwardMemory,
    OpTracer,
    Seen,
    Strides,
)


class NotTracedError(Exception):
    """A call has no trace yet."""


@final
class KnownTraces:
    """The traces that `tracer` has, for forked processes, in which torch cannot trace more."""

    def __init__(self, tracer: OpTracer) -> None:
        self._tracer = tracer

    def call(self, op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> CallMemory:
        """The call of `op` on operands `given`, whose names are `names`."""
        return _KnownCall(self._tracer.call(op, names, given))


@final
class _KnownCall:
    """The traces of one call; raises `NotTracedError` for those that are missing."""

    def __init__(self, call: CallMemory) -> None:
        self._call = call

    @property
    def forward(self) -> ForwardMemory | None:
        """The trace of the forward pass."""
        if not self.has_forward:
            raise NotTracedError
        return self._call.forward

    def backward(self, gradients: tuple[Strides | None, ...]) -> BackwardMemory:
        """The trace of the backward pass."""
        if not self.has_backward(gradients):
            raise NotTracedError
        return self._call.backward(gradients)

    @property
    def has_forward(self) -> bool:
        """Whether the forward pass is traced."""
        return self._call.has_forward

    def has_backward(self, gradients: tuple[Strides | None, ...]) -> bool:
        """Whether the backward pass is traced."""
        return self._call.has_backward(gradients)
