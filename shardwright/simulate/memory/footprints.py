"""Memory of operator calls, forward and backward, each traced once.

Equal calls are equal, so deep models cost no more than shallow ones. What kernels
need inside, unseen by torch, is `kernels`' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields
from functools import cached_property
from math import prod
from typing import Any, TypeVar, final

import torch

from shardwright.ir.graph import ITEM_BYTES, Arg, Op, Ref
from shardwright.simulate.memory.op_memory_trace import (
    Backward,
    Forward,
    OpMemoryTrace,
    Seen,
    Strides,
)
from shardwright.simulate.memory.values import contiguous_strides

T = TypeVar("T", Forward, Backward)
_Watching = Callable[[tuple[Seen, ...], torch.device], T]
_META = torch.device("meta")
_UNSEEN = (NotImplementedError, RuntimeError)  # what torch says of operators that need real data
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LONG = 64  # of a sequence: of longer ones this much is watched, and half of it


@final
class Footprints:
    """Watches calls, and remembers what it saw."""

    def __init__(self, *, on_cpu: bool = False) -> None:
        self._on_cpu = on_cpu
        self._calls: dict[Hashable, Call] = {}

    def call(self, op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> Call:
        """A call of `op`, whose operands `names`, each once, are `given`."""
        key = _key(op, names, given)
        if (found := self._calls.get(key)) is None:
            found = self._calls[key] = Call(op, names, given, on_cpu=self._on_cpu)
        return found


@final
class Call:
    """What one call does, and all that are equal to it; watched when it is asked."""

    def __init__(
        self, op: Op, names: Sequence[str], given: tuple[Seen, ...], *, on_cpu: bool
    ) -> None:
        self._op, self._names, self._given, self._on_cpu = op, names, given, on_cpu
        self._backward: dict[tuple[Strides | None, ...], Backward] = {}

    @cached_property
    def forward(self) -> Forward | None:
        """What it does forward; None if it cannot be watched."""
        try:
            return self._watched(lambda given, on: self._watch(given, on).forward())
        except _UNSEEN:
            return None

    def backward(self, gradients: tuple[Strides | None, ...]) -> Backward:
        """What it does when the gradients of its results come with such strides, or not at all.

        Where that cannot be watched, each operand's gradient is a tensor of its own.
        """
        if (seen := self._backward.get(gradients)) is None:
            try:
                seen = self._watched(lambda given, on: self._watch(given, on).backward(gradients))
            except _UNSEEN:
                made = self.forward.made if self.forward is not None else ()
                seen = _one_each(self._given, gradients, len(self._given) + len(made))
            self._backward[gradients] = seen
        return seen

    def _watch(self, given: tuple[Seen, ...], device: torch.device) -> OpMemoryTrace:
        return OpMemoryTrace(self._op, self._names, given, device)

    def _watched(self, watch: _Watching[T]) -> T:
        """What `watch` sees on meta tensors; of recurrent layers on two short sequences.

        What they keep grows evenly with the length, but for oneDNN's pages. On the CPU they run
        for real, as what oneDNN keeps is known to nobody else.
        """
        op, given = self._op, self._given
        if op.kind not in _RECURRENT:
            return watch(given, _META)
        device = torch.device("cpu") if self._on_cpu else _META
        length = given[0].shape[_time(op)]
        if length <= _LONG:
            return watch(given, device)
        short, longer = (watch(_cut(op, given, n), device) for n in (_LONG // 2, _LONG))
        try:
            grown: T = _grown(short, longer, (length - _LONG) / (_LONG // 2))
        except ValueError:  # one operator for every time step
            return watch(given, _META)
        return grown


def _one_each(
    given: tuple[Seen, ...], gradients: tuple[Strides | None, ...], first: int
) -> Backward:
    """New gradients for all operands that want one; storages are numbered from `first` on."""
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
    return Backward((*events, *((number, -1) for number in came)), tuple(found))


def _time(op: Op) -> int:
    """The dimension of the sequence in a recurrent layer's operand."""
    return 1 if op.args[8] else 0


def _cut(op: Op, given: tuple[Seen, ...], length: int) -> tuple[Seen, ...]:
    """The operands with a short sequence."""
    at, x = _time(op), given[0]
    shape = (*x.shape[:at], length, *x.shape[at + 1 :])
    return (x._replace(shape=shape, strides=contiguous_strides(shape)), *given[1:])


def _grown(short: Any, longer: Any, more: float) -> Any:
    """What grows evenly, `more` steps as from short to longer on; `ValueError` if its form does."""
    if isinstance(short, Forward | Backward):
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


def _key(op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> tuple[Hashable, ...]:
    place = {name: i for i, name in enumerate(names)}

    def renamed(arg: Arg) -> Hashable:
        if isinstance(arg, Ref):
            return ("operand", place[arg.name])
        if isinstance(arg, tuple):
            return tuple(renamed(a) for a in arg)
        return (type(arg).__name__, arg)

    kwargs = tuple((key, renamed(value)) for key, value in op.kwargs)
    return op.target, renamed(op.args), kwargs, given
