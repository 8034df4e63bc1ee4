import numpy as np
from hypothesis import given

from shardwright.solve.elimination.problem import Node, Problem, price
from shardwright.solve.frontier.sweep import sweep
from shardwright.solve.gaps.gap_heuristics import fill_gaps
from tests.harness.generators import layered_problem, problems
from tests.harness.oracles import is_frontier


@given(problems())
def test_filling_keeps_the_supported_points_and_prices_are_true(problem):
    supported = sweep(problem).points
    filled = fill_gaps(problem, supported)
    assert {p[:2] for p in supported} <= {p[:2] for p in filled}
    assert is_frontier(filled)
    assert all(price(problem, p.choice) == p[:2] for p in filled)


def test_gaps_are_filled_as_far_as_asked():
    problem = layered_problem(8, 6)
    supported = sweep(problem).points
    few, many = (fill_gaps(problem, supported, max_points=n) for n in (60, 1000))
    assert len(supported) < len(few) <= 60 + len(supported) < len(many)


def test_repeated_layers_are_mixed_layer_by_layer():
    layer = Node("layer", np.array([1.0, 2.0]), np.array([5, 3]))
    problem = Problem((layer,) * 10)
    supported = sweep(problem).points
    assert [p[:2] for p in supported] == [(10, 50), (20, 30)]
    assert [p[:2] for p in fill_gaps(problem, supported)] == [
        (10 + i, 50 - 2 * i) for i in range(11)
    ]
