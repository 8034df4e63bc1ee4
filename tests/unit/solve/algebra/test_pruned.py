"""Assignments in a region, against enumeration of all assignments."""

from itertools import product

import numpy as np
import pytest

from shardwright.solve.algebra.minplus import Objectives
from shardwright.solve.algebra.pruned import Budget, BudgetExceededError, assignments_in_region
from shardwright.solve.algebra.region import DominatedRegion
from shardwright.solve.elimination.problem import price
from tests.harness.generators import random_problem
from tests.harness.oracles import non_dominated

OBJECTIVES = Objectives(np.array([1.0, 0.0, 1.0, 1.0]), np.array([0.0, 1.0, 0.5, 2.0]))


def subject(seed):
    """A problem, the costs of the slower part of its frontier, and the region below those."""
    problem = random_problem([(0, 1), (1, 2), (0, 2), (2, 3)], 4, 3, seed)
    every = [price(problem, pick) for pick in product(range(3), repeat=4)]
    front = sorted(non_dominated(every))
    inner = front[len(front) // 3 :]
    corners = np.array([time for time, _ in inner]), np.array([memory for _, memory in inner])
    return problem, inner, DominatedRegion(OBJECTIVES, *corners)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slack", [0.0, 1e-6, 25.0])
def test_each_point_of_the_frontier_is_found_but_for_the_slack_that_is_told(seed, slack):
    problem, inside, region = subject(seed)
    found, used = assignments_in_region(problem, region, slack, Budget(10**6))
    costs = [price(problem, assignment) for assignment in found]
    assert 0 <= used <= slack * (1 + 1e-9)
    for time, memory in inside:
        # One that is slower than the region's last corner may have left the region.
        outside = not any(time + used <= t and memory <= m for t, m in inside)
        assert outside or any(t <= time + used + 1e-9 and m <= memory for t, m in costs)
    if slack < 1:  # times are whole numbers
        assert used == 0 and set(inside) <= set(costs)


def test_a_budget_that_does_not_suffice_ends_it():
    problem, _, region = subject(0)
    with pytest.raises(BudgetExceededError):
        assignments_in_region(problem, region, 0.0, Budget(3))
