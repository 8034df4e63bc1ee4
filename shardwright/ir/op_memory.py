"""Memory of single operator calls: what a call makes, what autograd keeps, when all of it goes.

Only torch knows that, so `tracing/op_memory` traces calls; the simulation of a step's memory is
handed an `OpTracer`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardwright.ir.graph import Arg, Op, Ref

Strides = tuple[int, ...]


class Seen(NamedTuple):
    """A tensor as a call is given it: its form, and whether a gradient is wanted."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Storages are numbered: those of the operands, then those made here, of `made` bytes.

    `results` have a storage, a shape, strides and a dtype each, None where there is no tensor;
    `saved` are the storages that autograd keeps; `peak` the most bytes made here at once.
    """

    results: tuple[tuple[int, tuple[int, ...], Strides, str] | None, ...]
    made: tuple[int, ...]
    saved: tuple[int, ...]
    peak: int


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """`events` are pairs (storage, bytes): born with so many, or dropped, where it is -1.

    Storages are numbered on: after those of the forward pass the results'
    gradients, then what is made here. `gradients` are the operands', None where none comes.
    """

    events: tuple[tuple[int, int], ...]
    gradients: tuple[tuple[int, Strides] | None, ...]


class CallMemory(Protocol):
    """The memory of one operator call, and of all calls equal to it."""

    @property
    def forward(self) -> ForwardMemory | None:
        """Memory of the forward pass; None if it cannot be traced."""

    def backward(self, gradients: tuple[Strides | None, ...]) -> BackwardMemory:
        """Memory of the backward pass, for these strides (or None) of the results' gradients."""

    @property
    def has_forward(self) -> bool:
        """Whether the forward pass is traced already."""

    def has_backward(self, gradients: tuple[Strides | None, ...]) -> bool:
        """Whether the backward pass is traced already."""


class OpTracer(Protocol):
    """Traces operator calls."""

    def call(self, op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> CallMemory:
        """A call of `op`, whose operands `names`, each once, are `given`."""


def call_key(op: Op, names: Sequence[str], given: tuple[Seen, ...]) -> tuple[Hashable, ...]:
    """A key that is equal for calls that do the same, whatever their operands are named."""
    place = {name: i for i, name in enumerate(names)}

    def renamed(arg: Arg) -> Hashable:
        if isinstance(arg, Ref):
            return ("operand", place[arg.name])
        if isinstance(arg, tuple):
            return tuple(renamed(a) for a in arg)
        return (type(arg).__name__, arg)

    kwargs = tuple((key, renamed(value)) for key, value in op.kwargs)
    return op.target, renamed(op.args), kwargs, given


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Strides of a new tensor of that shape.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
