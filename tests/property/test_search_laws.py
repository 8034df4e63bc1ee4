"""The laws of the search: what must hold for every problem, whatever finds the answer."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Edge, Node, Problem, price
from shardwright.solve.frontier.fast import Effort, fast_frontier
from shardwright.solve.frontier.sweep import sweep
from tests.harness.chain_frontier import chain_frontier
from tests.harness.generators import SHAPES, as_lists, layered_problem, problems, random_problem
from tests.harness.oracles import (
    INF,
    enumerate_problem,
    integer_program,
    is_frontier,
    least_time,
    lower_hull,
)

SEARCHES = {
    "exact": lambda problem: exact_frontier(problem).points,
    "pinned": lambda problem: exact_frontier(problem, max_table=2).points,
    "fast": lambda problem: fast_frontier(problem).points,
    "fast, pinned": lambda problem: fast_frontier(problem, Effort(max_table=2)).points,
}


def costs(points):
    return {(p.time, p.memory) for p in points}


@pytest.mark.parametrize("shape", SHAPES)
def test_search_equals_enumeration(shape):
    @settings(max_examples=40)
    @given(problems(shapes=(shape,)))
    def check(problem):
        found = exact_frontier(problem)
        assert found.pinned == ()
        assert costs(found.points) == enumerate_problem(*as_lists(problem))

    check()


@given(problems(shapes=("chain",), max_nodes=7))
def test_elimination_equals_the_linear_program_on_chains(problem):
    assert costs(exact_frontier(problem).points) == costs(chain_frontier(problem))


@settings(max_examples=40)
@given(problems(shapes=("complete", "skips", "tree")))
@pytest.mark.parametrize("name", SEARCHES)
def test_every_point_costs_what_it_says_and_beats_its_neighbours_in_one_way(name, problem):
    points = SEARCHES[name](problem)
    assert is_frontier(points)
    assert all(price(problem, p.choice) == p[:2] for p in points)


@settings(max_examples=40)
@given(problems(shapes=("complete", "ring")))
@pytest.mark.parametrize("name", SEARCHES)
def test_same_input_same_output(name, problem):
    again = Problem(
        tuple(Node(n.name, n.time.copy(), n.memory.copy()) for n in problem.nodes),
        tuple(Edge(e.tail, e.head, e.time.copy(), e.memory.copy()) for e in problem.edges),
    )
    assert SEARCHES[name](problem) == SEARCHES[name](problem)
    assert costs(SEARCHES[name](problem)) == costs(SEARCHES[name](again))


@settings(max_examples=40)
@given(problems())
def test_a_tighter_limit_is_never_faster(problem):
    best = [
        min((p.time for p in exact_frontier(problem, memory_limit=limit).points), default=INF)
        for limit in range(0, 60, 6)
    ]
    assert best == sorted(best, reverse=True)


@given(problems(), st.data())
def test_more_choices_are_never_worse(problem, data):
    k = [data.draw(st.integers(1, size)) for size in problem.sizes]
    nodes = tuple(
        Node(n.name, n.time[:i], n.memory[:i]) for n, i in zip(problem.nodes, k, strict=True)
    )
    edges = tuple(
        Edge(e.tail, e.head, e.time[: k[e.tail], : k[e.head]], e.memory[: k[e.tail], : k[e.head]])
        for e in problem.edges
    )
    more = costs(exact_frontier(problem).points)
    for time, memory in costs(exact_frontier(Problem(nodes, edges)).points):
        assert any(t <= time and m <= memory for t, m in more)


@given(problems())
def test_supported_points_lie_on_the_lower_hull_and_include_its_ends(problem):
    whole = enumerate_problem(*as_lists(problem))
    found = costs(sweep(problem).points)
    assert found <= lower_hull(whole)
    if whole:
        assert {min(whole), max(whole)} <= found


@settings(max_examples=60)
@given(problems())
@pytest.mark.parametrize("max_table", [1, 3, 1000])
def test_the_lower_bound_is_below_the_optimum_at_every_limit(max_table, problem):
    whole = enumerate_problem(*as_lists(problem))
    bound = sweep(problem, max_table=max_table).bound
    for limit in [*range(0, 60, 3), *(memory for _, memory in whole)]:
        assert bound.at(limit) <= least_time(whole, limit)


def test_an_integer_program_finds_the_same_times_at_the_same_limits():
    pairs = [(i, i + 1) for i in range(29)] + [(i, i + 3) for i in range(0, 27, 4)] + [(0, 29)]
    problem = random_problem(pairs, 30, 4, seed=7, most=30)
    exact = exact_frontier(problem)
    assert exact.pinned == ()
    bound = sweep(problem).bound
    for place in (0.1, 0.5, 0.9):
        limit = exact.points[int(place * len(exact.points))].memory + 1
        least = min(p.time for p in exact.points if p.memory <= limit)
        assert integer_program(*as_lists(problem), limit) == pytest.approx(least)
        assert bound.at(limit) <= least


def test_a_graph_of_repeated_layers_equals_the_same_graph_with_nothing_shared():
    shared = layered_problem(2, 3)
    copied = Problem(
        tuple(Node(n.name, n.time.copy(), n.memory.copy()) for n in shared.nodes),
        tuple(Edge(e.tail, e.head, e.time.copy(), e.memory.copy()) for e in shared.edges),
    )
    for search in (SEARCHES["exact"], SEARCHES["fast"]):
        assert search(shared) == search(copied)


def test_forbidding_everything_leaves_nothing():
    never = Node("never", np.array([INF, INF]), np.array([0, 0]))
    problem = Problem((never, never), ())
    assert all(search(problem) == () for search in SEARCHES.values())
    assert chain_frontier(problem) == ()
    assert not list(product(sweep(problem).points))
