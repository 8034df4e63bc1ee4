import math

import pytest
from hypothesis import given

from shardwright.solve.elimination.problem import price
from shardwright.solve.frontier.fast import fast_frontier
from shardwright.solve.frontier.sweep import sweep
from tests.harness.generators import as_lists, layered_problem, problems
from tests.harness.oracles import enumerate_problem, is_frontier, least_time


@given(problems())
def test_the_fast_frontier_has_both_ends_and_only_true_points(problem):
    whole = enumerate_problem(*as_lists(problem))
    found = fast_frontier(problem)
    costs = {p[:2] for p in found.points}
    assert bool(costs) == bool(whole)
    assert costs <= {(t, m) for t, m in costs if least_time(whole, m) <= t}
    if whole:
        assert {min(whole), max(whole)} <= costs


def test_without_a_feasible_assignment_there_are_no_points_and_no_finite_bound():
    problem = layered_problem(1, 2)
    nothing = type(problem.nodes[0])("x", [math.inf], [0])
    found = fast_frontier(type(problem)((nothing,)))
    assert found.points == () and found.lower_bound(10**9) == math.inf


@pytest.mark.parametrize("hub", [False, True])
def test_a_deep_problem_is_nearly_optimal_and_exactly_priced(hub):
    problem = layered_problem(100, 12, hub=hub)
    found = fast_frontier(problem)
    assert found.pinned == () and len(found.points) > 100 and is_frontier(found.points)
    for point in found.points[::50]:
        assert price(problem, point.choice) == point[:2]
        # A hub turns with a hundred edges at once, and leaves gaps that no line can see into.
        assert point.time <= (1.06 if hub else 1.01) * found.lower_bound(point.memory)
        assert found.lower_bound(point.memory) <= point.time


def test_what_is_not_wanted_is_not_filled():
    problem = layered_problem(2, 4)
    asked = []
    found = fast_frontier(problem, wanted=lambda bound: bool(asked.append(bound)))
    assert found.points == sweep(problem).points
    assert asked == [found.bound]
    assert len(fast_frontier(problem).points) > len(found.points)
