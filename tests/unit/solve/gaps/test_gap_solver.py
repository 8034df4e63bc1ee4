import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Node, Problem, price
from shardwright.solve.frontier.sweep import sweep
from shardwright.solve.gaps.gap_solver import close_gaps
from tests.harness.generators import layered_problem, problems, random_problem
from tests.harness.oracles import is_frontier, least_time

SKIPS = [(i, j) for i in range(14) for j in (i + 1, i + 3) if j < 14]


def finished(problem, **options):
    found = sweep(problem)
    return close_gaps(problem, found.points, found.points, found.bound, **options)


def limits(points):
    return [p.memory + d for p in points for d in (-1, 0, 1)]


@settings(max_examples=100)
@given(problems())
def test_without_a_tolerance_the_frontier_is_exact(problem):
    exact = [p[:2] for p in exact_frontier(problem).points]
    assert [p[:2] for p in finished(problem, tolerance=0.0).points] == exact


@settings(max_examples=100)
@given(problems(), st.sampled_from([0.01, 0.1, 0.3]), st.sampled_from([0, 3, 30, 10**6]))
def test_bounds_hold_and_points_cost_what_they_say_whatever_the_budget(problem, tolerance, sums):
    found = finished(problem, tolerance=tolerance, max_sums=sums)
    exact = {p[:2] for p in exact_frontier(problem).points}
    assert is_frontier(found.points)
    assert all(price(problem, p.choice) == p[:2] for p in found.points)
    for limit in limits(found.points):
        assert found.bound.at(limit) <= least_time(exact, limit)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tolerance", [0.003, 0.05])
def test_every_gap_is_closed_to_the_tolerance(seed, tolerance):
    problem = random_problem(SKIPS, 14, 5, seed)
    found = finished(problem, tolerance=tolerance)
    exact = {p[:2] for p in exact_frontier(problem).points}
    for limit in limits(found.points[:-1]):
        best = least_time(exact, limit)
        time = min((p.time for p in found.points if p.memory <= limit), default=math.inf)
        assert found.bound.at(limit) <= best <= time
        assert time == best or time * (1 - tolerance) <= found.bound.at(limit) * (1 + 1e-6)


def test_what_no_weight_and_no_single_change_finds_is_found():
    whole = Node("all or nothing", np.array([0.0, 100.0]), np.array([100, 0]))
    small = Node("small", np.array([0.0, 7.0, 8.0]), np.array([20, 9, 0]))
    problem = Problem((whole, small, small, small))
    found = finished(problem, tolerance=1e-3)
    assert {p[:2] for p in found.points} == {p[:2] for p in exact_frontier(problem).points}


def test_equal_layers_and_a_hub_are_finished_too():
    problem = layered_problem(3, 4, hub=True)
    found = finished(problem, tolerance=0.01)
    gaps = [
        1 - found.bound.at(a.memory - 1) / b.time
        for a, b in zip(found.points, found.points[1:], strict=False)
    ]
    assert max(gaps) <= 0.01 + 1e-6


def test_after_the_deadline_and_without_a_budget_nothing_changes():
    problem = random_problem(SKIPS, 14, 5, 0)
    found = sweep(problem)
    for options in ({"deadline": -math.inf}, {"max_sums": 0}):
        same = finished(problem, tolerance=1e-3, **options)
        assert same.points == found.points and same.bound == found.bound
    closer = finished(problem, tolerance=1e-3)
    assert len(closer.points) > len(found.points)
