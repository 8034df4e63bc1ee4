"""Workspaces of kernels, by hand for round numbers; tests/ranks/test_lifetimes.py measures them."""

from types import SimpleNamespace

import pytest

from shardwright.ir.graph import Op
from shardwright.ir.op_memory import Seen
from shardwright.simulate.memory.workspaces import Inside, inside

X, WEIGHT, RESULT = 2 * 32 * 8 * 8 * 4, 16 * 32 * 3 * 3 * 4, 2 * 16 * 6 * 6 * 4


def workspace(kind, shapes, *, device="cpu", dtype="float32", grad=False, block=16):
    op = Op("y", f"aten.{kind}.default", (), (), ("y",))
    given = [Seen(shape, (), dtype, grad) for shape in shapes]
    rank = SimpleNamespace(backend=SimpleNamespace(device=device), channel_block=block)
    return inside(op, given, SimpleNamespace(made=(RESULT,)), rank)


CONVOLUTION = "conv2d", ((2, 32, 8, 8), (16, 32, 3, 3))


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, (X + WEIGHT, RESULT + X + WEIGHT)),
        ({"grad": True}, (X + WEIGHT, RESULT + X + WEIGHT + X)),
        # Twice the channels of the result, in blocks of 32.
        ({"block": 32}, (X + 2 * WEIGHT, 2 * RESULT + X + 2 * WEIGHT)),
        ({"dtype": "float64"}, (0, 0)),
        ({"device": "cuda"}, (0, 0)),
    ],
)
def test_a_convolution_on_a_cpu_copies_to_blocks_of_channels(given, expected):
    assert workspace(*CONVOLUTION, **given) == Inside(*expected)


def test_few_channels_are_taken_as_they_come():
    few = (2, 4, 8, 8), (16, 4, 3, 3)
    assert workspace("conv2d", few, block=4).forward == max(16 * 4 * 3 * 3 * 4, RESULT)


def test_other_operators_have_none_but_for_the_differences_of_moments():
    assert workspace("relu", [(8, 8)]) == (0, 0)
    assert workspace("moments", [(8, 8)], device="cuda") == (256, 0)
