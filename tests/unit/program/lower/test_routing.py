"""Which devices hold which experts, along axes that send rows and axes that do not."""

import pytest

from shardwright.ir.layout import Layout, Mesh, chunk
from shardwright.program.lower.routing import routing


@pytest.mark.parametrize("size", [5, 7])
def test_owners_are_those_whose_tile_an_expert_lies_in(size):
    mesh = Mesh.parse("a=2 b=2")
    tokens, experts = Layout.parse("a:S(0) b:R", mesh), Layout.parse("a:S(0) b:S(0)", mesh)
    held = []
    for rank in range(4):
        a, b = mesh.coordinate(rank)
        outer, length = chunk(size, 2, a)
        inner, count = chunk(length, 2, b)
        held.append(range(outer + inner, outer + inner + count))
    for rank, own in enumerate(held):
        a, b = mesh.coordinate(rank)
        how = routing(tokens, experts, size, (own.start, len(own)))
        ((axis, owners),) = how.hops
        assert axis == "a" and str(how) == "routed over a"
        for other, theirs in enumerate(held):
            there = mesh.coordinate(other)
            assert {(owners[e], how.split[e]) for e in theirs} == {there}
        assert {(owners[e], how.split[e]) for e in own} == {(a, b)}


def test_rows_travel_the_outermost_axis_first():
    mesh = Mesh.parse("a=2 b=2 c=3")
    tokens, experts = (Layout.parse(f"a:S(0) b:S(0) c:{c}", mesh) for c in ("S(1)", "R"))
    how = routing(tokens, experts, 8, (0, 2))
    assert how.hops == (("a", (0, 0, 0, 0, 1, 1, 1, 1)), ("b", (0, 0, 1, 1, 0, 0, 1, 1)))
    assert set(how.split) == {0}


def test_a_device_with_all_experts_routes_nothing():
    mesh = Mesh.parse("a=2")
    assert routing(Layout.parse("a:S(0)", mesh), Layout.parse("a:R", mesh), 4, (0, 4)) is None
