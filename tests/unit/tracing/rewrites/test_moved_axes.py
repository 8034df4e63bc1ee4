"""Axes tell which element of a value is where, after operators that move elements."""

import pytest
import torch

from shardwright.ir.graph import Op, Ref
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.rewrites.moved_axes import (
    Axis,
    MovedError,
    broadcast,
    flat,
    moved,
    named,
    unified,
)

SIZES = {"t": 12, "w": 4}
WHOLE = tuple(named(*one) for one in SIZES.items())


def op(kind, *args):
    overload = {"transpose": "int", "squeeze": "dim"}.get(kind, "default")
    return Op("y", f"aten.{kind}.{overload}", (Ref("x"), *args), (), ("y",))


PATHS = [
    (op("view", (3, 4, 4)), op("permute", (1, 0, 2)), op("clone")),
    (op("transpose", 0, -1), op("view", (4, 3, 2, 2)), op("permute", (2, 0, -1, 1))),
    (op("t"), op("unsqueeze", 1), op("expand", (4, 5, 12)), op("transpose", 0, 1)),
    (op("repeat", (5, 1)), op("view", (5, 12, 4)), op("view", (5, 2, 6, 4))),
    (op("repeat", (3, 2, 2)), op("view", (3, 2, 12, 2, 4)), op("permute", (4, 2, 0, 1, 3))),
    (op("expand", (2, 12, 4)), op("view", (24, 2, 2)), op("view", (2, 3, 4, 4))),
    (op("unsqueeze", 0), op("squeeze", 0), op("_to_copy")),
]


def placed(axes, shape):
    """The index of the element of (t, w) at each place, as axes tell it."""
    found = torch.zeros(shape, dtype=torch.long)
    for d, dim in enumerate(axes):
        at, index = torch.arange(shape[d]), torch.zeros(shape[d], dtype=torch.long)
        inner = 1
        for axis in reversed(dim):
            stride = {"t": SIZES["w"], "w": 1, "": 0}[axis.label] * axis.stride
            index += at // inner % axis.size * stride
            inner *= axis.size
        found += index.view(-1, *[1] * (len(shape) - d - 1))
    return found


@pytest.mark.parametrize("path", PATHS)
def test_axes_tell_where_elements_are(path):
    x = torch.arange(SIZES["t"] * SIZES["w"]).view(*SIZES.values())
    axes = WHOLE
    for one in path:
        (x,) = call_op(one, {"x": x.contiguous()}, torch.device("cpu"))
        axes = moved(one, axes, x.shape)
        assert torch.equal(placed(axes, x.shape), x)


def test_parts_are_joined_again():
    parts = moved(op("view", (3, 4, 2, 2)), WHOLE, (3, 4, 2, 2))
    assert parts[:2] == ((Axis("t", 3, 4),), (Axis("t", 4, 1),))
    assert moved(op("view", (12, 4)), parts, (12, 4)) == WHOLE
    assert flat(parts) == (Axis("t", 12, 1), Axis("w", 4, 1))


def test_equal_elements_take_the_axes_of_others():
    repeated = moved(op("repeat", (5, 1)), WHOLE, (60, 4))
    (rows, _) = broadcast(repeated, ((Axis("e", 5, 1), Axis("t", 12, 1)), ()))
    assert rows == (Axis("e", 5, 1), Axis("t", 12, 1))
    assert unified((), named("t", 12)) == named("t", 12)


@pytest.mark.parametrize(
    "a, b",
    [
        (named("t", 12), named("w", 12)),
        ((Axis("t", 3, 4), Axis("t", 4, 1)), (Axis("t", 3, 1), Axis("t", 4, 3))),
        ((Axis("", 4, 0), Axis("t", 3, 1)), (Axis("", 3, 0), Axis("t", 4, 1))),
    ],
)
def test_different_dimensions_are_not_unified(a, b):
    with pytest.raises(MovedError):
        unified(a, b)


def test_axes_are_not_cut_unevenly():
    with pytest.raises(MovedError):
        moved(op("view", (8, 6)), WHOLE, (8, 6))
    with pytest.raises(MovedError, match="flip"):
        moved(op("flip", (0,)), WHOLE, (12, 4))
