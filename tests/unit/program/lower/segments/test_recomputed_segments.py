"""Instructions of a segment come together, and give what others read."""

import pytest

from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Compute, RecomputedSegment
from shardwright.program.lower.segments.recomputed_segments import grouped_segments


def compute(name, *reads):
    return Compute(Op(name, "aten.add.Tensor", tuple(map(Ref, reads)), (), (name,)), ((2,),))


def names(instructions):
    return [
        (one.gives, names(one.instructions)) if isinstance(one, RecomputedSegment) else one.op.name
        for one in instructions
    ]


@pytest.mark.parametrize(
    "returned, gives", [((), ("a", "c")), (("b",), ("a", "b", "c")), (("d", "e"), ("a", "c"))]
)
def test_a_segment_gives_what_is_read_behind_it_or_returned(returned, gives):
    """While it is written d reads it, behind it e does; `before` may run first."""
    order = [
        (compute("a", "x"), 1),
        (compute("before", "x"), 0),
        (compute("b", "a"), 1),
        (compute("d", "a"), 0),
        (compute("c", "b", "before"), 1),
        (compute("e", "c", "d"), 0),
    ]
    found = grouped_segments(*zip(*order, strict=True), returned)
    assert names(found) == ["before", (gives, ["a", "b", "c"]), "d", "e"]
    assert found[1].takes == ("x", "before")
