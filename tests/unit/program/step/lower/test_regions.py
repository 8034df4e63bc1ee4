"""Regions are shared by stretches that compute the same, whatever their values are called."""

import pytest

from shardwright.ir.graph import Op, Ref, Source
from shardwright.program.instructions import Compute
from shardwright.program.step.lower.regions import RegionTable


def region(table, name, argument):
    op = Op(name, "aten.add.Tensor", (Ref("x"), argument), {}, (name,), Source())
    return table.add([Compute(op, ((2,),))], ["x"], [name], [True], [True], [False])


def test_names_do_not_matter():
    table = RegionTable()
    assert region(table, "a", 1) == region(table, "b", 1) == (0, 0)


@pytest.mark.parametrize("other", (1.0, True))
def test_equal_arguments_of_other_types_are_other_regions(other):
    """1 == 1.0 == True: the second of two layers computed in the dtype of the first."""
    table = RegionTable()
    assert region(table, "a", 1) == (0, 0)
    assert region(table, "b", other) == (1, 0)
