import numpy as np
from hypothesis import given

from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import price
from tests.harness.generators import layered_problem, problems
from tests.harness.oracles import non_dominated


def all_assignments(problem):
    return np.indices(problem.sizes).reshape(len(problem.nodes), -1).T


@given(problems())
def test_best_points_are_the_non_dominated_prices(problem):
    assignments = all_assignments(problem)
    points = best_points(PriceList.of(problem), [assignments[::2], assignments[1::2]])
    costs = {price(problem, row) for row in assignments.tolist()}
    assert {p[:2] for p in points} == non_dominated(costs)
    assert all(price(problem, p.choice) == p[:2] for p in points)


def test_prices_of_real_numbers_agree_to_the_last_bit():
    problem = layered_problem(6, 5)
    rows = np.random.default_rng(0).integers(0, 5, (40, len(problem.nodes)))
    points = best_points(PriceList.of(problem), [rows])
    assert points
    assert all(price(problem, p.choice) == p[:2] for p in points)


def test_equal_tables_are_listed_once():
    few, many = PriceList.of(layered_problem(3, 5)), PriceList.of(layered_problem(30, 5))
    assert len(few.time) == len(many.time)
