"""Hubs are bounded from below, and leaving out what is not worth it loses nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.solve.algebra.minplus import Objectives, extreme_objectives
from shardwright.solve.elimination.problem import Edge, Node, Problem
from shardwright.solve.elimination.solver import make_solver
from shardwright.solve.folding import bound_pruning
from shardwright.solve.folding.bound_pruning import pruned_by_bounds
from shardwright.solve.folding.folded import Folded, FoldedChain
from shardwright.solve.folding.shared_inputs import SharedInputBounds, shared_inputs_of
from tests.harness.generators import as_lists
from tests.harness.oracles import enumerate_problem

WEIGHTS = np.concatenate(([0.0], np.geomspace(1e-5, 1e5, 41)))
HUBS = (5, 6)


def decoder(seed, *, count=2, scale=1, unit=1.0):
    """Entry - [inside - exit] x count - tail, and two hubs that all copies and some others read."""
    rng = np.random.default_rng(seed)

    def table(*shape, most=20):
        time = rng.integers(0, most * scale, shape) * unit
        return time, rng.integers(0, most * scale, shape)

    sizes = [2, 2, 3, 2, 2, 4, 3]  # head, entry, inside, exit, tail, hubs
    nodes = [Node(f"n{i}", *table(size)) for i, size in enumerate(sizes)]
    pairs = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4), (5, 2), (6, 3), (6, 4), (0, 5)]
    edges = tuple(Edge(t, h, *table(sizes[t], sizes[h], most=8)) for t, h in pairs)
    run = FoldedChain(nodes=(2, 3), entry=1, exit=3, count=count, after=frozenset({4}))
    return Folded(Problem(tuple(nodes), edges), (run,))


def fixed(problem, hub, choice):
    """The problem in which a hub has one choice, written out."""
    whole = problem.unfolded()
    time = np.where(np.arange(whole.sizes[hub]) == choice, whole.nodes[hub].time, np.inf)
    nodes = list(whole.nodes)
    nodes[hub] = Node("fixed", time, whole.nodes[hub].memory)
    return Problem(tuple(nodes), whole.edges)


class Plain:
    """What finds the points that bounds are compared with."""

    too_wide = False

    def __init__(self, problem):
        self.minimise = make_solver(problem, 10**6).minimise


@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_no_choice_of_a_hub_costs_less_than_its_bound(seed):
    problem = decoder(seed)
    assert shared_inputs_of(problem) == HUBS
    objectives = Objectives(np.array([1.0, 1.0, 0.0]), np.array([0.0, 0.7, 1.0]))
    bounds = SharedInputBounds(problem, HUBS, 10**6)
    assert not bounds.too_wide
    double, single = bounds.at(objectives), bounds.at(objectives, single=True)
    for hub, exact, rounded in zip(HUBS, double, single, strict=True):
        assert rounded == pytest.approx(exact, rel=1e-5)
        for choice in range(problem.problem.sizes[hub]):
            frontier = enumerate_problem(*as_lists(fixed(problem, hub, choice)))
            for row, (a, b) in enumerate(zip(objectives.time, objectives.memory, strict=True)):
                least = min(a * time + b * memory for time, memory in frontier)
                assert exact[row, choice] <= least + 1e-9


def test_the_bound_of_an_only_hub_is_exact():
    problem = decoder(3)
    (rows,) = SharedInputBounds(problem, (5,), 10**6).at(Objectives(np.ones(1), np.array([0.7])))
    for choice, bound in enumerate(rows[0]):
        frontier = enumerate_problem(*as_lists(fixed(problem, 5, choice)))
        assert bound == pytest.approx(min(t + 0.7 * m for t, m in frontier))


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.integers(2, 9),
    st.sampled_from([(1, 1.0), (1000, 1.0), (1000, 0.1)]),  # tenths are rounded in bounds
    st.sampled_from([1, bound_pruning._FEW]),  # with 1, no two ranges are united
)
def test_a_narrowed_problem_has_the_least_values_of_the_whole(seed, count, times, few):
    scale, unit = times
    problem = decoder(seed, count=count, scale=scale, unit=unit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound_pruning, "_FEW", few)
        ranges = pruned_by_bounds(problem, 10**6, Plain)
    rows = extreme_objectives(*problem.most)
    every = Objectives(
        np.concatenate((np.ones(len(WEIGHTS)), rows.time)),
        np.concatenate((WEIGHTS, rows.memory)),
    )
    least, _ = make_solver(problem, 10**6).minimise(every)
    with np.errstate(divide="ignore"):
        weights = every.memory / every.time
    before = -1.0
    for narrow in ranges:
        mine = (weights > before) & (weights <= narrow.most)
        before = narrow.most
        part = Objectives(every.time[mine], every.memory[mine])
        values, choice = make_solver(narrow.folded, 10**6).minimise(part)
        assert values == pytest.approx(least[mine])
        whole = narrow.expand(choice)
        assert all(set(whole[:, hub]) <= set(kept.tolist()) for hub, kept in narrow.left.items())
    assert before == np.inf


def test_what_costs_more_everywhere_is_left_out():
    problem = decoder(1, count=9)
    hub = problem.problem.nodes[5]
    dear = np.where(np.arange(4) == 2, 1e4, hub.time), np.where(np.arange(4) == 2, 10**4, 7)
    nodes = (*problem.problem.nodes[:5], Node("dear", *dear), problem.problem.nodes[6])
    ranges = pruned_by_bounds(
        Folded(Problem(nodes, problem.problem.edges), problem.runs), 10**6, Plain
    )
    assert ranges
    assert all(2 not in narrow.left[5] for narrow in ranges)


def test_without_hubs_and_with_bounds_too_wide_nothing_is_narrowed():
    problem = decoder(0)
    assert pruned_by_bounds(problem, 3, Plain) == ()
    alone = Folded(problem.problem)
    assert pruned_by_bounds(alone, 10**6, Plain) == ()
