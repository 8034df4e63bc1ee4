import numpy as np

from shardwright.solve.algebra.minplus import minimise, weighted
from shardwright.solve.elimination.pin import best_pins, minimise_pinned
from shardwright.solve.elimination.problem import Edge, Node, Problem, price
from shardwright.solve.elimination.schedule import make_schedule
from tests.harness.generators import random_problem

COMPLETE = [(i, j) for i in range(7) for j in range(i)]
WEIGHTS = np.array([0.0, 1.0, 9.0])


def test_settling_is_never_worse_than_the_first_guess_and_often_better():
    better = 0
    for seed in range(5):
        problem = random_problem(COMPLETE, 7, 4, seed=seed)
        schedule = make_schedule(problem, 16)
        assert schedule.pinned
        guess = best_pins(problem, schedule.pinned, weighted(WEIGHTS), None)
        first, _ = minimise(schedule, weighted(WEIGHTS), 7, guess)
        values, choice = minimise_pinned(problem, schedule, weighted(WEIGHTS))
        assert (values <= first).all()
        better += int((values < first).sum())
        for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
            time, memory = price(problem, row)
            assert time + weight * memory == value
    assert better > 5


def test_a_pin_avoids_what_its_edges_forbid():
    cheap_but_forbidden = Node("hub", np.array([0.0, 5.0]), np.array([0, 0]))
    other = Node("other", np.array([1.0]), np.array([0]))
    edge = Edge(0, 1, np.array([[np.inf], [0.0]]), np.zeros((2, 1), np.int64))
    problem = Problem((cheap_but_forbidden, other), (edge,))
    assert best_pins(problem, (0,), weighted(WEIGHTS), None).tolist() == [[1]] * 3
