"""Runs of operators between redistributions that communicate."""

import pytest

from shardwright.ir.graph import Op, Ref
from shardwright.ir.layout import Mesh
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import Compute, Move, Program, Redistribute
from shardwright.program.step.lower.stretches import _cut


def compute(name, *reads):
    return Compute(Op(name, "aten.add.Tensor", tuple(map(Ref, reads)), (), (name,)), ((),))


def summed(value, shape, *, forward=True):
    move = Move("dp", Collective.ALL_REDUCE, shape, -1, -1, 0, 0, True)
    ways = ((move,), ()) if forward else ((), (move,))
    shapes = (shape,) * 4
    return Redistribute(value, f"{value}/summed", "P -> R", *shapes, *ways, True)


def runs(*instructions, reduced=()):
    program = Program(Mesh.parse("dp=2"), 0, ("x",), instructions, (), ())
    return [
        [inner.op.name for inner in one] if isinstance(one, list) else one.result
        for one, _, _ in _cut(program, reduced)
    ]


@pytest.mark.parametrize(
    "shape, forward, behind",
    [
        ((), True, [["b"], ["c", "d"]]),  # b need not wait for the number
        ((), False, [["b", "c", "d"]]),  # there is nothing to wait for
        ((4,), True, [["b", "c", "d"]]),
    ],
)
def test_a_run_ends_before_a_number_that_is_summed_is_read(shape, forward, behind):
    order = compute("a", "x"), summed("a", shape, forward=forward)
    order += compute("b", "x"), compute("c", "b", "a/summed"), compute("d", "c", "a/summed")
    assert runs(*order) == [["a"], "a/summed", *behind]
