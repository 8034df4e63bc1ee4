"""Rules of elementwise operators that can be applied to partial sums, and of factories."""

from __future__ import annotations

from dataclasses import replace

from shardwright.rules.call import Call
from shardwright.rules.notation import Notation, elementwise, parse


def add(call: Call) -> Notation:
    """Sums of two tensors are linear: the result is a partial sum if both operands are."""
    both = len(call.operands) == 2 and call.floating
    return elementwise(call.operands, call.results[0], linear=[[0, 1]] if both else [])


def mul(call: Call) -> Notation:
    """Products are linear in each factor: one factor may be a partial sum."""
    linear = [[i] for i in range(len(call.operands))] if call.floating else []
    return elementwise(call.operands, call.results[0], linear=linear)


def div(call: Call) -> Notation:
    """Quotients are linear in the dividend, which may be a partial sum."""
    rounded = dict(call.op.kwargs).get("rounding_mode") is not None
    linear = [[0]] if call.floating and not rounded and _divides(call) else []
    return elementwise(call.operands, call.results[0], linear=linear)


def _divides(call: Call) -> bool:
    """Whether the first operand is the dividend: not in `2.0 / x`."""
    return bool(call.op.args) and not isinstance(call.op.args[0], int | float)


def where(call: Call) -> Notation:
    """`where` is linear in the two tensors together: both may be partial sums."""
    dtypes = [call.graph.tensor[name].dtype for name in call.op.operands]
    linear = (
        [[1, 2]] if len(dtypes) == 3 and dtypes[1] == dtypes[2] and "float" in dtypes[1] else []
    )
    return elementwise(call.operands, call.results[0], linear=linear)


def dropout(call: Call) -> Notation:
    """A mask times a tensor: linear in the tensor."""
    return elementwise(call.operands, call.results[0], linear=[[0]] if call.floating else [])


def prelu(call: Call) -> Notation | None:
    """A slope per channel, which is dimension 1; or one slope, which may have no dimension."""
    if not call.operands[1]:
        return elementwise(call.operands, call.results[0])
    if len(call.operands[0]) < 2:
        return None
    return parse("n c ..., c -> n c ...", call.operands, call.results)


def fill_shape(call: Call) -> Notation:
    """`full`, `zeros`, `new_zeros` …: all elements are equal, so any tile can be filled locally."""
    one = elementwise([], call.results[0])
    return replace(one, operands=tuple(((),) * len(shape) for shape in call.operands))


def arange(call: Call) -> Notation:
    """`arange` and the like: every device computes all elements."""
    whole = range(len(call.results[0]))
    return elementwise([], call.results[0], whole=whole, reason="each element is its position")
