"""Checks of single values in files: each returns its value or raises Type- or ValueError."""

from __future__ import annotations

import re
from math import inf, prod
from typing import Any, TypeVar

from shardwright.ir.atomic_io import check_printable
from shardwright.ir.graph import Constant, TensorValue

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


def constant(value: Any) -> Constant:
    """The constant that `packed_constant` wrote: a number, text, truth value, None or tensor."""
    if isinstance(value, dict) and value.keys() == {"dtype", "shape", "elements"}:
        if not re.fullmatch(r"bool|u?int\d+", kind := str(value["dtype"])):
            raise ValueError(f"a constant tensor of {kind!r}, not of integers or truth values")
        shape = tuple(map(size, value["shape"]))
        elements = tuple(of_type(one, int) for one in value["elements"])
        if prod(shape) != len(elements):
            raise ValueError(f"a constant tensor of shape {shape} with {len(elements)} elements")
        return TensorValue(kind, shape, elements)
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{value!r} where a plain constant is needed")
    if isinstance(value, str):
        check_printable(value)
    plain: Constant = value
    return plain


def packed_constant(value: Constant) -> Any:
    """JSON for a constant of a graph, which `constant` reads."""
    if isinstance(value, TensorValue):
        shape, elements = list(value.shape), list(value.elements)
        return {"dtype": value.dtype, "shape": shape, "elements": elements}
    return value
