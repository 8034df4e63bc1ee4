"""Bounds of a search by memory: the least of all, and those with inputs on the host."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.plans.mesh_bounds import (
    MeshBound,
    hides_copies,
    least_seconds,
    without_copies,
)
from shardwright.planner.plans.mesh_frontier import mesh_frontier
from shardwright.planner.space_factory import SpaceFactory
from shardwright.solve.elimination.eliminate import exact_frontier
from tests.harness import models

MACHINE = preset("2xH100")


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=6),
    st.integers(0, 12),
)
def test_the_least_bound_is_found_and_only_what_decides_is_refined(given_bounds, most):
    refined = []

    def bound(number, known, closer, can):
        def refine():
            refined.append(number)
            return lambda memory: closer - memory

        return MeshBound(1, lambda memory: known - memory, refine if can else None)

    bounds = [bound(n, *one) for n, one in enumerate(given_bounds)]
    final = [max(known, closer) if can else known for known, closer, can in given_bounds]
    least = min([most, *(seconds + 1 - 5 for seconds in final)])
    assert least_seconds(bounds, 5, most) == least
    assert len(refined) == len(set(refined))
    for number in refined:
        assert given_bounds[number][0] + 1 - 5 <= least
    assert least_seconds(bounds, 5, most) == least  # what was refined stays


@pytest.fixture(scope="module")
def graph():
    model, batch = models.small_llama(layers=5, hidden=32, heads=4, rows=8, length=8)
    return sw.capture(model, (), batch)


@pytest.mark.parametrize("rate", [1e6, 2e8, 55e9])
def test_bounds_leave_out_what_copies_cost(graph, rate):
    machine = replace(MACHINE, device=replace(MACHINE.device, host_bytes_per_s=rate))
    factory = SpaceFactory(graph, recompute=True)
    space, _ = factory.space(machine, Mesh.parse("dp=2"), "adamw", 1, host=True)
    assert space.most_copy_seconds > 0
    _, bound, _ = mesh_frontier(space, False, math.inf, lambda _: True)
    quick, closer = hides_copies(bound, space), without_copies(space)
    free = exact_frontier(space.folded_without_copies.unfolded()).points
    costly = exact_frontier(space.folded.unfolded()).points
    gaps = []
    for point in free:
        best = min(p.time for p in free if p.memory <= point.memory)
        assert closer(point.memory) <= best * (1 + 1e-12)
        assert quick(point.memory) <= best * (1 + 1e-12)
        gaps.append(1 - closer(point.memory) / best)
    assert max(gaps) < 0.05  # the hull of such a small problem has wide gaps
    # Plans with their copies are no faster than those without, and need no less memory.
    for point in costly:
        assert closer(point.memory) <= point.time
    assert min(p.memory for p in free) <= min(p.memory for p in costly)


def test_plans_of_a_search_have_close_bounds_with_inputs_on_the_host():
    model, batch = models.small_llama(layers=6, hidden=512, heads=8, rows=32, length=256)
    graph = sw.capture(model, (), batch)
    plain = sw.search(graph, "4xH100", offload=False)
    limit = int(0.3 * plain.costs[0][1])
    found = sw.search(graph, "4xH100", offload=True)
    fastest = found.fastest(limit)
    assert fastest.offload
    assert 0.9 * fastest.step_seconds < fastest.lower_bound_seconds <= fastest.step_seconds
    for plan in found.plans[:: max(1, len(found.plans) // 6)]:
        simulated = found.compared(plan)
        # Tables know no bucket that is more than full, which saves a part of a message.
        assert plan.lower_bound_seconds <= simulated.step_seconds * (1 + 2e-3)
