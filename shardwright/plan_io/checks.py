"""Checks of single values in files: each returns its value or raises Type- or ValueError."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

from shardwright.ir.atomic_io import check_printable

T = TypeVar("T")


def of_type(value: Any, kind: type[T]) -> T:
    """`value`, of the type `kind`; a truth value is no number, a text has no control characters."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} where a {kind.__name__} is needed")
    if isinstance(value, str):
        check_printable(value)
    return value


def number(value: Any) -> float:
    """`value`, a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise TypeError(f"{value!r} where a number of at least 0 is needed")
    if value == inf:
        raise ValueError("Infinity where a number is needed")
    return float(value)


def size(value: Any) -> int:
    """`value`, a whole number of bytes or elements, from 0 to 2^63."""
    if not 0 <= of_type(value, int) < 2**63:
        raise ValueError(f"{value} where a number from 0 to 2^63 is needed")
    return int(value)


def at_least_one(value: Any) -> int:
    """`value`, a whole number of at least 1."""
    if of_type(value, int) < 1:
        raise ValueError(f"{value} where a number of at least 1 is needed")
    return int(value)


def plain_constant(value: Any) -> Any:
    """`value`, a number, text, truth value or None."""
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r} where a plain constant is needed")
    if isinstance(value, str):
        check_printable(value)
    return value
