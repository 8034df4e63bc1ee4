"""Follows dimensions through operators that only move or repeat elements.

A dimension is a list of axes, the outermost first. An axis is a part of a named dimension of some
value: its size, and its stride in units of elements of that dimension. A view of tokens
(t = b · s) as (b, s) has the axes (t, b, s) and (t, s, 1); joined they are (t, t, 1) again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.ir.graph import Op, whole_number, whole_numbers

SAME = ("clone", "contiguous", "alias", "_to_copy")
_RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
TURNS = ("transpose", "permute", "t")
MOVES = (*SAME, *_RESHAPES, *TURNS, "expand", "repeat")
_EQUAL = ""


class Axis(NamedTuple):
    """A part of the dimension `label`; along one without a label all elements are equal."""

    label: str
    size: int
    stride: int


Dim = tuple[Axis, ...]  # of one element if it is empty
Axes = tuple[Dim, ...]


class MovedError(Exception):
    """Raised for dimensions that cannot be followed."""


def named(label: str, size: int) -> Dim:
    """A whole dimension."""
    return (Axis(label, size, 1),) if size > 1 else ()


def moved(op: Op, axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes of the result of `op`, of this shape, from those of its first operand.

    Raises `MovedError` if `op` is not one of `MOVES`, or cuts an axis unevenly.
    """
    if op.kind in SAME:
        return axes
    if op.kind in _RESHAPES:
        return grouped([axis for dim in axes for axis in dim], shape)
    if op.kind in TURNS:
        return tuple(axes[i] for i in _order(op, len(axes)))
    if op.kind not in ("expand", "repeat"):
        raise MovedError(op.kind)
    aligned = ((),) * (len(shape) - len(axes)) + axes
    times = [n // max(1, size_of(dim)) for n, dim in zip(shape, aligned, strict=True)]
    return tuple(
        _joined((Axis(_EQUAL, n, 0), *dim)) if n > 1 else dim
        for n, dim in zip(times, aligned, strict=True)
    )


def size_of(dim: Dim) -> int:
    """The number of elements along a dimension."""
    count = 1
    for axis in dim:
        count *= axis.size
    return count


def broadcast(*operands: Axes) -> Axes:
    """The axes of an elementwise result; raises `MovedError` if operands differ along one."""
    rank = max(map(len, operands))
    result: Axes = ((),) * rank
    for axes in operands:
        aligned = ((),) * (rank - len(axes)) + axes
        result = tuple(unified(a, b) for a, b in zip(result, aligned, strict=True))
    return result


def unified(a: Dim, b: Dim) -> Dim:
    """The dimension that both are; axes along which elements are equal take those of the other.

    Raises `MovedError` if they are different ones.
    """
    if not a or not b:
        return a or b
    first, second, found = [*a], [*b], list[Axis]()
    while first and second:
        size = min(first[-1].size, second[-1].size)
        x, y = _inner(first, size), _inner(second, size)
        if _EQUAL not in (x.label, y.label) and x != y:
            raise MovedError(f"{x} and {y}")
        found.insert(0, y if x.label == _EQUAL else x)
    if first or second:
        raise MovedError(f"{a} and {b}")
    return _joined(found)


def flat(axes: Axes) -> Dim:
    """All axes as one dimension."""
    return _joined([axis for dim in axes for axis in dim])


def _order(op: Op, rank: int) -> list[int]:
    if op.kind == "permute":
        return [d % rank for d in whole_numbers(op.args[1])]
    if op.kind == "t":
        return [*range(rank)][::-1]
    order = [*range(rank)]
    a, b = (whole_number(d) % rank for d in op.args[1:3])
    order[a], order[b] = b, a
    return order


def grouped(axes: Sequence[Axis], shape: Sequence[int]) -> Axes:
    """Axes of one flat dimension, grouped into dimensions of these sizes.

    Raises `MovedError` if that cuts one unevenly.
    """
    axes = [*axes]
    dims: list[Dim] = []
    for size in reversed(shape):
        dim: list[Axis] = []
        while size > 1:
            if not axes:
                raise MovedError("sizes")
            axis = _inner(axes, min(size, axes[-1].size))
            if size % axis.size:
                raise MovedError(f"{axis} in {size}")
            size //= axis.size
            dim.insert(0, axis)
        dims.insert(0, _joined(dim))
    return tuple(dims)


def _inner(axes: list[Axis], size: int) -> Axis:
    """Takes the innermost `size` elements off the last of `axes`."""
    axis = axes.pop()
    if axis.size % size:
        raise MovedError(f"{axis} by {size}")
    if axis.size > size:
        axes.append(Axis(axis.label, axis.size // size, axis.stride * size))
    return Axis(axis.label, size, axis.stride)


def _joined(axes: Sequence[Axis]) -> Dim:
    """`axes` with neighbours joined that are parts of one dimension."""
    found: list[Axis] = []
    for axis in axes:
        last = found[-1] if found else None
        if last and last.label == axis.label and last.stride == axis.stride * axis.size:
            axis = Axis(axis.label, last.size * axis.size, axis.stride)
            found.pop()
        found.append(axis)
    return tuple(found)
