"""Merging loses nothing: the merged problem has the same best values, and its choices cost them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.solve.algebra.minplus import weighted
from shardwright.solve.elimination.merged import merge
from shardwright.solve.elimination.problem import Edge, Node, Problem, price
from shardwright.solve.elimination.solver import make_solver
from shardwright.solve.folding.folded import Folded, FoldedChain
from tests.harness.generators import as_lists, problems
from tests.harness.oracles import enumerate_problem

WEIGHTS = np.array([0.0, 0.3, 1.0, 4.0])


def agreeing(rng, rows, columns):
    """A table in which every row allows one column at random."""
    time = np.full((rows, columns), np.inf)
    time[np.arange(rows), rng.permutation(max(rows, columns))[:rows] % columns] = rng.integers(0, 9)
    return time, rng.integers(0, 9, (rows, columns))


@st.composite
def agreements(draw):
    """A problem in which some nodes decide others, in chains and in rings."""
    problem = draw(problems(max_nodes=5, max_choices=3, forbidden=False))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    num = len(problem.nodes)
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, num - 1), st.integers(0, num - 1)).filter(
                lambda pair: pair[0] != pair[1]
            ),
            max_size=4,
        )
        if num > 1
        else st.just([])
    )
    sizes = problem.sizes
    more = tuple(Edge(a, b, *agreeing(rng, sizes[a], sizes[b])) for a, b in pairs)
    return Problem(problem.nodes, (*problem.edges, *more))


@given(agreements())
@settings(max_examples=150)
def test_the_best_of_a_merged_problem_is_the_best_of_all(problem):
    frontier = enumerate_problem(*as_lists(problem))
    values, choice = make_solver(Folded(problem), 10**6).minimise(weighted(WEIGHTS))
    for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
        assert value == pytest.approx(
            min((t + weight * m for t, m in frontier), default=float("inf"))
        )
        time, memory = price(problem, row)
        assert time + weight * memory == pytest.approx(value)


def chain(count):
    """Entry - [a = b - exit] x count - x = y, where = allows one choice for each."""
    rng = np.random.default_rng(5)

    def table(*shape):
        return rng.integers(0, 20, shape).astype(float), rng.integers(0, 20, shape)

    nodes = tuple(Node(f"n{i}", *table(3)) for i in range(6))
    edges = (
        Edge(0, 1, *table(3, 3)),
        Edge(1, 2, *agreeing(rng, 3, 3)),
        Edge(2, 3, *table(3, 3)),
        Edge(3, 4, *table(3, 3)),
        Edge(5, 4, *agreeing(rng, 3, 3)),
    )
    run = FoldedChain(nodes=(1, 2, 3), entry=0, exit=3, count=count, after=frozenset({3}))
    return Folded(Problem(nodes, edges), (run,))


@pytest.mark.parametrize("count", [1, 3])
def test_nodes_merge_inside_of_runs_and_outside(count):
    problem = chain(count)
    merged = merge(problem)
    assert [len(run.nodes) for run in merged.folded.runs] == [2]
    assert len(merged.folded.problem.nodes) == 4
    whole = problem.unfolded()
    frontier = enumerate_problem(*as_lists(whole))
    values, choice = make_solver(problem, 10**6).minimise(weighted(WEIGHTS))
    for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
        assert value == pytest.approx(min(t + weight * m for t, m in frontier))
        assert sum(np.multiply((1.0, weight), price(whole, row))) == pytest.approx(value)
    assert {1, 2} <= set(merged.originals([1]))


def test_a_merged_node_never_has_more_choices_and_equal_tables_stay_one():
    rng = np.random.default_rng(0)
    own, link = (np.arange(4.0), np.arange(4)), agreeing(rng, 4, 4)
    free = np.zeros((4, 4)), np.ones((4, 4), np.int64)
    nodes = tuple(Node(f"n{i}", *own) for i in range(6))
    pairs = [(0, 1, link), (1, 2, free), (2, 3, link), (3, 4, free), (4, 5, link)]
    problem = Problem(nodes, tuple(Edge(a, b, *table) for a, b, table in pairs))
    small = merge(Folded(problem)).folded.problem
    assert small.sizes == (4, 4, 4)
    assert len({id(node.time) for node in small.nodes}) == 1
    assert len({id(edge.time) for edge in small.edges}) == 1


def test_a_switch_stays():
    """It has two choices, and what it decides has more: a merged node would be larger than it."""
    time = np.full((2, 5), np.inf)
    time[0, :4] = time[1, 4] = 0.0
    nodes = Node("switch", np.zeros(2), np.zeros(2, int)), Node("n", np.zeros(5), np.zeros(5, int))
    problem = Problem(nodes, (Edge(0, 1, time, np.zeros((2, 5), int)),))
    assert merge(Folded(problem)).folded.problem.sizes == (2, 5)
