import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier import sweep as module
from shardwright.solve.frontier.sweep import DualBound, sweep
from tests.harness.generators import as_lists, layered_problem, problems, random_problem
from tests.harness.oracles import enumerate_problem, least_time, lower_hull

COMPLETE = [(i, j) for i in range(6) for j in range(i)]


def costs(points):
    return {(p.time, p.memory) for p in points}


@given(problems())
def test_a_whole_sweep_finds_every_vertex_of_the_hull(problem):
    whole = enumerate_problem(*as_lists(problem))
    found = sweep(problem)
    assert found.complete and not found.pinned
    hull = lower_hull(whole)
    assert {c for c in hull if _is_vertex(c, hull)} <= costs(found.points) <= hull


def _is_vertex(point, hull):
    """A point of the hull is a vertex unless it lies on the line of its neighbours."""
    ordered = sorted(hull)
    i = ordered.index(point)
    if i in (0, len(ordered) - 1):
        return True
    (a, b), (c, d) = ordered[i - 1], ordered[i + 1]
    return (c - a) * (point[1] - b) != (d - b) * (point[0] - a)


def test_few_weights_find_some_vertices_and_both_ends():
    problem = layered_problem(4, 6)
    few, many = sweep(problem, max_weights=5), sweep(problem, max_weights=1000)
    assert not few.complete and many.complete
    assert 2 < len(few.points) <= 7 < len(many.points)
    assert {few.points[0], few.points[-1]} <= set(many.points)


def test_a_sweep_without_time_has_the_ends():
    assert len(sweep(layered_problem(4, 6), seconds=0).points) == 2


def test_passes_of_any_size_find_the_same(monkeypatch):
    problem = layered_problem(4, 6)
    whole = sweep(problem)
    monkeypatch.setattr(module, "_TABLE_BYTES", 1)
    assert sweep(problem) == whole


@pytest.mark.parametrize("max_table", [1, 4, 16, 64])
def test_the_bound_holds_with_pinned_nodes_too(max_table):
    problem = random_problem(COMPLETE, 6, 4, seed=5)
    whole = enumerate_problem(*as_lists(problem))
    found = sweep(problem, max_table=max_table)
    assert found.pinned and not found.complete
    for limit in range(min(m for _, m in whole) - 5, max(m for _, m in whole) + 5):
        assert found.bound.at(limit) <= least_time(whole, limit)


def test_pinned_bounds_are_of_use_on_a_hub():
    problem = layered_problem(12, 4, hub=True)
    exact, pinned = sweep(problem), sweep(problem, max_table=16)
    assert pinned.pinned == (96,) and not exact.pinned
    for point in exact.points:
        assert 0.9 * point.time < pinned.bound.at(point.memory) <= point.time


def test_a_bound_is_tight_at_a_vertex_and_says_when_nothing_fits():
    found = sweep(layered_problem(4, 6))
    for point in found.points:
        assert math.isclose(found.bound.at(point.memory), point.time, rel_tol=1e-9)
    assert found.bound.at(found.points[-1].memory - 1) == math.inf
    assert math.isclose(found.bound.at(math.inf), found.points[0].time, rel_tol=1e-9)


def test_a_bound_is_never_negative():
    assert DualBound(((0.0, 0.0), (1.0, 5.0)), 0).at(9) == 0.0


def test_what_is_proved_at_a_limit_holds_below_it_too():
    bound = DualBound(((0.0, 5.0), (0.5, 9.0)), least_memory=2).with_proved([(6, 7.0), (9, 5.5)])
    assert [bound.at(limit) for limit in (1, 4, 6, 7, 9, 10)] == [math.inf, 7.0, 7.0, 5.5, 5.5, 5.0]
    limits = np.arange(12)
    assert bound.bounds_at(limits).tolist() == [bound.at(limit) for limit in limits.tolist()]


@given(problems(), st.sampled_from([1e-3, 0.05, 0.3]))
def test_a_coarse_sweep_leaves_no_more_to_be_won_than_its_resolution(problem, resolution):
    coarse = sweep(problem, resolution=resolution)
    for (time, memory), after in pairwise((p.time, p.memory) for p in coarse.points):
        narrow = after[0] <= time * (1 + resolution) or memory <= after[1] * (1 + resolution)
        for point in sweep(problem).points if not narrow else ():
            if after[1] < point.memory < memory:
                weight = (after[0] - time) / (memory - after[1])
                line = time + weight * (memory - point.memory)
                assert point.time >= line * (1 - resolution) * (1 - 1e-9)


def test_a_coarse_sweep_passes_over_neighbours_of_about_one_time_or_memory():
    # All plans take a second, and those below 100 bytes as much longer as they are smaller.
    search = SimpleNamespace(lines=[(0.0, 1.0), (1.0, 101.0)])

    def gaps(seconds, memory, resolution):
        hull = [Point(1.0, memory, ()), Point(seconds, 100, ())]
        return len(module._WeightedSearch.widest(search, hull, set(), resolution))

    assert gaps(2.0, 120, 0.1) == gaps(1.05, 105, 0.0) == 1
    assert gaps(2.0, 109, 0.1) == gaps(1.09, 120, 0.1) == 0


def test_a_coarse_sweep_takes_fewer_weights():
    problem = layered_problem(4, 6)
    coarse, fine = sweep(problem, resolution=0.02), sweep(problem)
    assert len(coarse.bound.lines) < len(fine.bound.lines)
    assert {coarse.points[0], coarse.points[-1]} <= set(fine.points)
