"""Traces the memory of operator calls, forward and backward; equal calls are traced once.

The number of traces therefore does not grow with the number of equal layers. Torch does not report
the workspace that kernels allocate inside; `simulate/memory/workspaces.py` estimates it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from functools import cached_property
from math import prod
from typing import Any, TypeVar, final

import torch

from shardwright.ir.graph import ITEM_BYTES, Op
from shardwright.ir.op_memory import (
    BackwardMemory,
    ForwardMemory,
    Seen,
    Strides,
    call_key,
    contiguous_strides,
)
from shardwright.tracing.op_memory.op_memory_trace import OpMemoryTrace
from shardwright.tracing.own_operators.fused_norm import on_accelerators

T = TypeVar("T", ForwardMemory, BackwardMemory)
_Tracing = Callable[[tuple[Seen, ...], torch.device], T]
_META = torch.device("meta")
_UNSEEN = (NotImplementedError, RuntimeError)  # torch's errors for operators that need real data
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LONG = 64  # time steps; longer sequences are traced at this length and at half of it


@final
class Footprints:
    """Traces calls and caches the traces.

    If `on_cpu`, recurrent layers run on the CPU, and norms as single operators, as torch has them
    there; else norms are what accelerators' kernel for them is.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self._on_cpu = on_cpu
        self._calls: dict[Hashable, MeasuredCall] = {}

    def call(self, op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> MeasuredCall:
        """The call of `op` on the operands `given`, whose names are `names`, each once.

        Equal calls return one object. Nothing is traced yet.
        """
        key = call_key(op, names, given)
        if (found := self._calls.get(key)) is None:
            found = self._calls[key] = MeasuredCall(op, names, given, on_cpu=self._on_cpu)
        return found


@final
class MeasuredCall:
    """The memory of one operator call and of all calls equal to it, traced when first read."""

    def __init__(
        self, op: Op, names: Sequence[str], given: tuple[Seen, ...], *, on_cpu: bool
    ) -> None:
        self._op = op if on_cpu else on_accelerators(op, [seen.dtype for seen in given])
        self._names, self._given, self._on_cpu = names, given, on_cpu
        self._backward: dict[tuple[Strides | None, ...], BackwardMemory] = {}

    @cached_property
    def forward(self) -> ForwardMemory | None:
        """The trace of the forward pass; None if it cannot be traced."""
        try:
            return self._traced(lambda given, on: self._trace(given, on).forward())
        except _UNSEEN:
            return None

    def backward(self, gradients: tuple[Strides | None, ...]) -> BackwardMemory:
        """The trace of the backward pass.

        `gradients` has the strides, in elements, of each result's gradient, or None for a result
        that gets no gradient. Where the pass cannot be traced, the gradient of each operand that
        requires one is assumed to be a new contiguous tensor.
        """
        if (seen := self._backward.get(gradients)) is None:
            try:
                seen = self._traced(lambda given, on: self._trace(given, on).backward(gradients))
            except _UNSEEN:
                made = self.forward.made if self.forward is not None else ()
                seen = _one_each(self._given, gradients, len(self._given) + len(made))
            self._backward[gradients] = seen
        return seen

    @property
    def has_forward(self) -> bool:
        """Whether the forward pass is traced already."""
        return "forward" in vars(self)

    def has_backward(self, gradients: tuple[Strides | None, ...]) -> bool:
        """Whether the backward pass is traced already."""
        return gradients in self._backward

    def _trace(self, given: tuple[Seen, ...], device: torch.device) -> OpMemoryTrace:
        return OpMemoryTrace(self._op, self._names, given, device)

    def _traced(self, trace: _Tracing[T]) -> T:
        """The trace of a call on meta tensors.

        Recurrent layers with long sequences are traced on two shorter ones and extrapolated: their
        saved memory grows linearly with the length, up to the rounding of oneDNN's buffers. For CPU
        ranks they run on CPU tensors, because meta kernels do not report what oneDNN saves.
        """
        op, given = self._op, self._given
        if op.kind not in _RECURRENT:
            return trace(given, _META)
        device = torch.device("cpu") if self._on_cpu else _META
        length = given[0].shape[_time(op)]
        if length <= _LONG:
            return trace(given, device)
        short, longer = (trace(_cut(op, given, n), device) for n in (_LONG // 2, _LONG))
        try:
            grown: T = _grown(short, longer, (length - _LONG) / (_LONG // 2))
        except ValueError:  # decomposes into one operator per time step
            return trace(given, _META)
        return grown


def _one_each(
    given: tuple[Seen, ...], gradients: tuple[Strides | None, ...], first: int
) -> BackwardMemory:
    """Assumes a new gradient for each operand that requires one.

    The results' gradients and then the operands' are numbered from `first`.
    """
    came = [first + i for i in range(sum(s is not None for s in gradients))]
    events = [(number, 0) for number in came]
    found: list[tuple[int, Strides] | None] = []
    for seen in given:
        if not seen.requires_grad:
            found.append(None)
            continue
        number = first + len(events)
        events.append((number, prod(seen.shape) * ITEM_BYTES[seen.dtype]))
        found.append((number, contiguous_strides(seen.shape)))
    return BackwardMemory((*events, *((number, -1) for number in came)), tuple(found))


def _time(op: Op) -> int:
    """The time dimension of a recurrent layer's first operand."""
    return 1 if op.args[8] else 0


def _cut(op: Op, given: tuple[Seen, ...], length: int) -> tuple[Seen, ...]:
    """The operands with a contiguous sequence of `length` time steps as the first."""
    at, x = _time(op), given[0]
    shape = (*x.shape[:at], length, *x.shape[at + 1 :])
    return (x._replace(shape=shape, strides=contiguous_strides(shape)), *given[1:])


def _grown(short: Any, longer: Any, more: float) -> Any:
    """Extrapolate linearly from two traces, by `more` times their difference.

    Raises `ValueError` if the traces have different numbers of storages or events.
    """
    if isinstance(short, ForwardMemory | BackwardMemory):
        parts = (
            _grown(getattr(short, f.name), getattr(longer, f.name), more) for f in fields(short)
        )
        return type(short)(*parts)
    if isinstance(short, tuple):
        pairs = zip(short, longer, strict=True)  # raises for another length
        return tuple(_grown(a, b, more) for a, b in pairs)
    if short is None or isinstance(short, str):
        return short
    return round(longer + (longer - short) * more)
