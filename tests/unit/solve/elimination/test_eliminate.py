import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Node, Problem, price
from tests.harness.generators import as_lists, problems, random_problem
from tests.harness.oracles import enumerate_problem, is_frontier

COMPLETE = [(i, j) for i in range(6) for j in range(i)]


def costs(points):
    return {(p.time, p.memory) for p in points}


@given(problems(), st.integers(0, 40))
def test_a_memory_limit_leaves_out_exactly_what_is_above_it(problem, limit):
    whole = enumerate_problem(*as_lists(problem))
    found = exact_frontier(problem, memory_limit=limit).points
    assert costs(found) == {c for c in whole if c[1] <= limit}


def test_nodes_may_share_their_times_and_not_their_memories():
    time = np.array([1.0, 2.0])
    nodes = (Node("a", time, np.array([9, 1])), Node("b", time, np.array([4, 2])))
    found = exact_frontier(Problem(nodes)).points
    assert [p[:2] for p in found] == [(2, 13), (3, 5), (4, 3)]


def test_a_complete_graph_is_searched_exactly_where_tables_may_be_large():
    problem = random_problem(COMPLETE, 6, 3, seed=1)
    found = exact_frontier(problem)
    assert found.pinned == ()
    assert costs(found.points) == enumerate_problem(*as_lists(problem))


def test_pinned_nodes_are_named_and_points_still_cost_what_they_say():
    problem = random_problem(COMPLETE, 6, 3, seed=1)
    found = exact_frontier(problem, max_table=9)
    assert found.pinned == (0, 1, 2)
    assert found.points and is_frontier(found.points)
    assert all(price(problem, p.choice) == p[:2] for p in found.points)
    whole = enumerate_problem(*as_lists(problem))
    assert all(any(t <= p.time and m <= p.memory for t, m in whole) for p in found.points)


def test_pins_follow_both_ends_of_the_frontier():
    problem = random_problem(COMPLETE, 6, 3, seed=2)
    found = exact_frontier(problem, max_table=9)
    pins = {tuple(p.choice[node] for node in found.pinned) for p in found.points}
    assert len(pins) == 2
