"""Operator calls at the sizes of one device, and their measured times."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwright.ir.graph import Arg, text_of
from shardwright.ir.layout import Seconds

_GIVEN = re.compile(r"(\w+)\[([\d, ]*)\]('?)(?= |$)")


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """Shape and dtype of a tensor operand, and whether it requires a gradient."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{chr(39) * self.requires_grad}"


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operator call; its tensors are `Ref`s to their indices in `given`.

    >>> from shardwright.ir.graph import Ref
    >>> x, weight = OperandSpec((4, 8), "float32", True), OperandSpec((16, 8), "float32", True)
    >>> print(OpCall("aten.linear.default", (Ref("0"), Ref("1")), (), (x, weight)))
    aten.linear.default(%0, %1) float32[4, 8]' float32[16, 8]'
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    given: tuple[OperandSpec, ...]

    def __str__(self) -> str:
        words = [*map(text_of, self.args), *(f"{key}={text_of(v)}" for key, v in self.kwargs)]
        return " ".join([f"{self.target}({', '.join(words)})", *map(str, self.given)])


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds of a call, named by its text, forward and backward."""

    call: str
    forward: Seconds
    backward: Seconds

    @property
    def target(self) -> str:
        return self.call.partition("(")[0]

    @property
    def given(self) -> tuple[OperandSpec, ...]:
        """The tensor operands of the call.

        >>> Timing("aten.relu.default(%0) float32[4, 8]'", 1e-6, 1e-6).given
        (OperandSpec(shape=(4, 8), dtype='float32', requires_grad=True),)
        """
        tensors = _GIVEN.findall(self.call.rpartition(") ")[2])
        return tuple(
            OperandSpec(tuple(int(size) for size in shape.split(", ") if size), dtype, bool(mark))
            for dtype, shape, mark in tensors
        )


@cache
def by_call(timings: tuple[Timing, ...]) -> dict[str, Timing]:
    """Timings by the texts of their calls; the dict is cached and must not be changed."""
    return {timing.call: timing for timing in timings}


@cache
def by_target(
    timings: tuple[Timing, ...],
) -> Mapping[str, tuple[tuple[Timing, tuple[OperandSpec, ...]], ...]]:
    """Timings by operator, each with the tensor operands of its call."""
    found: defaultdict[str, list[tuple[Timing, tuple[OperandSpec, ...]]]] = defaultdict(list)
    for timing in timings:
        found[timing.target].append((timing, timing.given))
    return {target: tuple(those) for target, those in found.items()}
