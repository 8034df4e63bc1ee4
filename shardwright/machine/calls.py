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
class Given:
    """A tensor that an operator is called with."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{chr(39) * self.requires_grad}"


@dataclass(frozen=True, slots=True)
class Call:
    """One operator call; its tensors are `Ref`s to their numbers in `given`.

    >>> from shardwright.ir.graph import Ref
    >>> given = (Given((4, 8), "float32", True), Given((16, 8), "float32", True))
    >>> print(Call("aten.linear.default", (Ref("0"), Ref("1")), (), given))
    aten.linear.default(%0, %1) float32[4, 8]' float32[16, 8]'
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    given: tuple[Given, ...]

    def __str__(self) -> str:
        words = [*map(text_of, self.args), *(f"{key}={text_of(v)}" for key, v in self.kwargs)]
        return " ".join([f"{self.target}({', '.join(words)})", *map(str, self.given)])


@dataclass(frozen=True, slots=True)
class Timing:
    """What a call, by its text, takes forward and backward."""

    call: str
    forward: Seconds
    backward: Seconds

    @property
    def target(self) -> str:
        return self.call.partition("(")[0]

    @property
    def given(self) -> tuple[Given, ...]:
        """The tensors of the call.

        >>> Timing("aten.relu.default(%0) float32[4, 8]'", 1e-6, 1e-6).given
        (Given(shape=(4, 8), dtype='float32', requires_grad=True),)
        """
        tensors = _GIVEN.findall(self.call.rpartition(") ")[2])
        return tuple(
            Given(tuple(int(size) for size in shape.split(", ") if size), dtype, bool(mark))
            for dtype, shape, mark in tensors
        )


@cache
def by_call(timings: tuple[Timing, ...]) -> dict[str, Timing]:
    """Timings by their calls' texts; not to be changed."""
    return {timing.call: timing for timing in timings}


@cache
def by_target(
    timings: tuple[Timing, ...],
) -> Mapping[str, tuple[tuple[Timing, tuple[Given, ...]], ...]]:
    """Timings by their operators, each with the tensors given."""
    found: defaultdict[str, list[tuple[Timing, tuple[Given, ...]]]] = defaultdict(list)
    for timing in timings:
        found[timing.target].append((timing, timing.given))
    return {target: tuple(those) for target, those in found.items()}
