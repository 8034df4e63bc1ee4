from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from shardwright.solve.algebra import minplus
from shardwright.solve.algebra.minplus import (
    extreme_objectives,
    minimise,
    relaxed_minimum,
    weighted,
)
from shardwright.solve.elimination.problem import Problem, most, price
from shardwright.solve.elimination.schedule import make_schedule
from tests.harness.generators import problems, random_problem
from tests.harness.oracles import INF

WEIGHTS = np.array([0.0, 0.5, 1.0, 7.0])
COMPLETE = [(i, j) for i in range(5) for j in range(i)]


def all_prices(problem):
    return [price(problem, x) for x in product(*(range(k) for k in problem.sizes))]


def no_pins(rows):
    return np.zeros((rows, 0), np.int64)


@given(problems())
@pytest.mark.parametrize("block", [1 << 17, 32, 1])
def test_values_are_least_and_assignments_reach_them(block, problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minplus, "_AT_ONCE", block)
        values, choice = minimise(
            make_schedule(problem, 10**6), weighted(WEIGHTS), len(problem.nodes), no_pins(4)
        )
    prices = all_prices(problem)
    for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
        assert value == min(t + weight * m for t, m in prices)
        time, memory = price(problem, row)
        assert time + weight * memory == value


@given(problems())
def test_ends_break_ties_by_the_other_cost(problem):
    objectives = extreme_objectives(*most(problem))
    schedule = make_schedule(problem, 10**6)
    values, choice = minimise(schedule, objectives, len(problem.nodes), no_pins(4))
    allowed = [c for c in all_prices(problem) if c[0] < INF]
    if not allowed:
        assert np.isinf(values).all()
        return
    fastest, smallest = min(allowed), min(c[::-1] for c in allowed)
    assert values[:2].tolist() == [fastest[0], smallest[0]]
    assert [price(problem, row) for row in choice[2:].tolist()] == [fastest, smallest[::-1]]


def of_equal_tables(problem):
    """`problem` with the tables of its first node and edge everywhere."""
    node, edge = problem.nodes[0], problem.edges[0]
    nodes = tuple(replace(one, time=node.time, memory=node.memory) for one in problem.nodes)
    edges = tuple(replace(one, time=edge.time, memory=edge.memory) for one in problem.edges)
    return Problem(nodes, edges)


@pytest.mark.parametrize("max_table", [1, 3, 9])
@pytest.mark.parametrize("made", [lambda problem: problem, of_equal_tables])
@pytest.mark.parametrize("apart", [0, 1])
def test_pins_are_kept_and_the_relaxation_is_below_every_assignment(max_table, made, apart):
    problem = made(random_problem(COMPLETE, 5, 3, seed=4))
    schedule = make_schedule(problem, max_table)
    pins = (np.arange(4)[:, None] + apart * np.arange(len(schedule.pinned)) // 2) % 3
    values, choice = minimise(schedule, weighted(WEIGHTS), 5, pins)
    assert (choice[:, list(schedule.pinned)] == pins).all()
    bounds = relaxed_minimum(schedule, weighted(WEIGHTS))
    for weight, value, bound, row, pin in zip(
        WEIGHTS, values, bounds, choice.tolist(), pins.tolist(), strict=True
    ):
        held = [
            (t + weight * m)
            for x in product(range(3), repeat=5)
            if [x[node] for node in schedule.pinned] == pin
            for t, m in [price(problem, x)]
        ]
        time, memory = price(problem, row)
        assert time + weight * memory == value == min(held)
        assert bound <= min(t + weight * m for t, m in all_prices(problem))
