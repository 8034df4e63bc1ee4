"""Which devices hold which experts, along axes that send rows and axes that do not."""

import pytest

from shardwright.ir.hosts import neighbours
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
        how = routing(tokens, experts, size, (own.start, len(own)), {})
        ((axis, owners, is_last),) = how.hops
        assert axis == "a" and str(how) == "routed over a" and is_last
        for other, theirs in enumerate(held):
            there = mesh.coordinate(other)
            assert {(owners[e], how.split[e]) for e in theirs} == {there}
        assert {(owners[e], how.split[e]) for e in own} == {(a, b)}


def test_rows_travel_the_outermost_axis_first():
    mesh = Mesh.parse("a=2 b=2 c=3")
    tokens, experts = (Layout.parse(f"a:S(0) b:S(0) c:{c}", mesh) for c in ("S(1)", "R"))
    how = routing(tokens, experts, 8, (0, 2), {})
    assert [(hop.axis, hop.to) for hop in how.hops] == [
        ("a", (0, 0, 0, 0, 1, 1, 1, 1)),
        ("b", (0, 0, 1, 1, 0, 0, 1, 1)),
    ]
    assert set(how.split) == {0}


def test_rows_go_to_hosts_first_and_then_to_the_devices_of_their_host():
    mesh = Mesh.parse("ep=6 tp=2")
    tokens, experts = (Layout.parse("ep:S(0) tp:R", mesh) for _ in range(2))
    near = neighbours(mesh, 4)
    assert near == {"ep": 2}
    how = routing(tokens, experts, 6, (3, 1), near)  # of position 3, the second one of its host
    assert str(how) == "routed over ep (by host)" and how.axes == ("ep",)
    first, last = how.hops
    assert (first.to, last.to) == ((1, 1, 3, 3, 5, 5), (0, 1, 2, 3, 4, 5))
    assert last.is_last and not first.is_last


def test_a_device_with_all_experts_routes_nothing():
    mesh = Mesh.parse("a=2")
    tokens, experts = Layout.parse("a:S(0)", mesh), Layout.parse("a:R", mesh)
    assert routing(tokens, experts, 4, (0, 4), {}) is None
