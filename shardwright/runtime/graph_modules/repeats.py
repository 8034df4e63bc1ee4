"""Cuts a region into segments at repeated layers, so that equal ones share code.

A segment is written in names of its own, and random operators with numbers relative to none: equal
layers are equal segments. Cuts are where the fewest values pass, which in a transformer is the
residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from shardwright.ir.graph import FUNCTION
from shardwright.program.instructions import (
    Attention,
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    RunModule,
    Uniform,
    reads,
    writes,
)
from shardwright.program.step.lower.regions import renamed, written_arguments
from shardwright.program.step.region import Region
from shardwright.tracing.export.operators import OVERLOAD, operator_of

_DRAW = (Dropout, Uniform, Attention, DroppedMlp, RunModule)
# A call of compiled code takes as long as a few operators, so shorter periods are repeated.
_LEAST_OPERATORS = 8


@dataclass(frozen=True, slots=True)
class SharedCode:
    """The operators of a segment, without what distinguishes it from equal ones.

    Equal code is one module. `variants` are as in `Region`. The numbers of random operators are
    zero, and `texts` are the arguments, in which 1, 1.0 and True differ.
    """

    variants: tuple[tuple[Instruction, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def draws(self) -> bool:
        """Whether an operator draws random numbers."""
        return any(isinstance(one, _DRAW) for one in self.variants[0])


@dataclass(frozen=True, slots=True)
class Segment:
    """Successive instructions of a region: its code, and the names of the values that it takes.

    `numbers` are those of its random operators, in order.
    """

    code: SharedCode
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: tuple[int, ...]


class _Run(NamedTuple):
    """A stretch in which each operator does what the one `period` operators before it does."""

    start: int
    stop: int
    period: int


@dataclass(frozen=True)
class _Operators:
    """The operators of a region.

    Attributes:
        forms: int [operators], equal for those that do the same on whichever values.
        spans: int [values, 2], the operators that make a value and that read it last.
        elementwise: bool [operators].
    """

    forms: np.ndarray
    spans: np.ndarray
    elementwise: np.ndarray

    @staticmethod
    def of(region: Region) -> _Operators:
        first = region.variants[0]
        maker = {name: at for at, one in enumerate(first) for name in writes(one)}
        last = {name: at for at, one in enumerate(first) for name in reads(one) if name in maker}
        spans = [(maker[name], at) for name, at in last.items()]
        elementwise = np.array([_is_elementwise(one) for one in first], dtype=bool)
        return _Operators(_forms(region), np.array(spans).reshape(-1, 2), elementwise)


def segments(region: Region) -> list[Segment]:
    """The segments of a region, in order."""
    first = region.variants[0]
    last_read = {name: at for at, one in enumerate(first) for name in reads(one)}
    last_read.update(dict.fromkeys(region.outputs, len(first)))
    cuts = [*_cuts(_Operators.of(region), 0, len(first)), len(first)]
    return [
        _segment(region, start, stop, last_read)
        for start, stop in zip([0, *cuts], cuts, strict=False)
        if start < stop
    ]


def _segment(region: Region, start: int, stop: int, last_read: dict[str, int]) -> Segment:
    """Instructions `start` to `stop` as code that equal segments share, and what differs."""
    names: dict[str, str] = {}
    inputs: list[str] = []
    made: list[str] = []
    for one in region.variants[0][start:stop]:
        for name in reads(one):
            if name not in names:
                names[name] = f"in{len(inputs)}"
                inputs.append(name)
        for name in writes(one):
            names[name] = f"v{len(made)}"
            made.append(name)
    outputs = tuple(name for name in made if last_read.get(name, -1) >= stop)
    written = [[_unnumbered(renamed(one, names)) for one in v[start:stop]] for v in region.variants]
    code = SharedCode(
        tuple(tuple(one for one, _ in variant) for variant in written),
        tuple(names[name] for name in inputs),
        tuple(names[name] for name in outputs),
        tuple(written_arguments(one) for one, _ in written[0]),
    )
    numbers = tuple(number for _, number in written[0] if number is not None)
    return Segment(code, tuple(inputs), outputs, numbers)


def _unnumbered(one: Instruction) -> tuple[Instruction, int | None]:
    """An instruction without the number that tells it from other random operators, and that."""
    if isinstance(one, Dropout | Uniform):
        *args, number = one.op.args
        assert isinstance(number, int), "the last argument is the number"
        return replace(one, op=replace(one.op, args=(*args, 0))), number
    if isinstance(one, Attention | DroppedMlp | RunModule):
        return replace(one, number=0), one.number
    return one, None


def _forms(region: Region) -> np.ndarray:
    """Int [operators]: equal for those that do the same, on whichever values."""
    known: dict[object, int] = {}
    found = []
    for alternatives in zip(*region.variants, strict=True):
        names = dict.fromkeys((*reads(alternatives[0]), *writes(alternatives[0])), "")
        written = [_unnumbered(renamed(one, names))[0] for one in alternatives]
        form = *written, written_arguments(written[0])
        found.append(known.setdefault(form, len(known)))
    return np.array(found, dtype=np.int64)


def _is_elementwise(one: Instruction) -> bool:
    if not isinstance(one, Compute) or one.routing is not None or one.op.target == FUNCTION:
        return False
    target = operator_of(one.op.target)
    return isinstance(target, OVERLOAD) and torch.Tag.pointwise in target.tags


def _cuts(operators: _Operators, start: int, stop: int) -> Iterator[int]:
    """The ends of segments before `stop`, in order: around the layers that cover the most."""
    run = _longest(operators.forms[start:stop])
    if run is None:
        return
    found = _placed(operators, _Run(start + run.start, start + run.stop, run.period))
    yield from _cuts(operators, start, found.start)
    yield from (at for at in range(found.start, found.stop + 1, found.period) if start < at < stop)
    yield from _cuts(operators, found.stop, stop)


def _longest(forms: np.ndarray) -> _Run | None:
    """The run that covers the most operators in whole periods; of several the shortest period."""
    best, covered = None, 0
    for period in range(_LEAST_OPERATORS, len(forms) // 2 + 1):
        same = np.concatenate(([False], forms[:-period] == forms[period:], [False]))
        if np.count_nonzero(same) + period <= covered:
            continue
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        if not len(edges):
            continue
        first, last = edges[np.argmax(edges[:, 1] - edges[:, 0])]
        length = last - first + period
        if (whole := length // period * period) > covered and whole >= 2 * period:
            best, covered = _Run(int(first), int(first + length), period), whole
    return best


def _placed(operators: _Operators, run: _Run) -> _Run:
    """The whole periods of a run that begin where the fewest values are passed on.

    Elementwise operators begin a segment rather than end one: they are fused with what follows, and
    the mask that a ReLU saves would be kept beside its result.
    """
    made, read = operators.spans[operators.spans[:, 0] >= run.start].T
    # Values that are passed on from before each index.
    passed = np.zeros(len(operators.forms) + 2, dtype=np.int64)
    np.add.at(passed, made + 1, 1)
    np.add.at(passed, read + 1, -1)
    passed = np.cumsum(passed)
    elementwise = operators.elementwise

    def price(start: int) -> tuple[float, bool, int]:
        inner = range(start + run.period, run.stop - run.period + 1, run.period)
        return float(np.mean(passed[list(inner)])), bool(elementwise[start + run.period - 1]), start

    starts = range(run.start, min(run.start + run.period, run.stop - 2 * run.period + 1))
    start = min(starts, key=price)
    return _Run(start, start + (run.stop - start) // run.period * run.period, run.period)
