import numpy as np
import pytest

from shardwright.solve.algebra.minplus import weighted
from shardwright.solve.elimination import solver
from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Edge, Node, Problem, ProblemError, price
from shardwright.solve.elimination.solver import make_solver
from shardwright.solve.folding.folded import Folded, FoldedChain
from shardwright.solve.frontier.fast import fast_frontier
from tests.harness.generators import as_lists
from tests.harness.oracles import enumerate_problem

WEIGHTS = np.array([0.0, 0.3, 1.0, 4.0])


def folded(seed, count, hub):
    """Head - entry - [inside - exit] x count - tail, with a skip, and a hub that all see."""
    rng = np.random.default_rng(seed)

    def table(*shape):
        return rng.integers(0, 20, shape).astype(float), rng.integers(0, 20, shape)

    sizes = [2, 3, 2, 3, 2, 2]  # head, entry, inside, exit, tail, hub
    nodes = tuple(Node(f"n{i}", *table(size)) for i, size in enumerate(sizes))
    pairs = [(0, 1), (1, 2), (3, 2), (1, 3), (3, 4)] + ([(5, 2), (0, 5)] if hub else [(0, 5)])
    edges = tuple(Edge(t, h, *table(sizes[t], sizes[h])) for t, h in pairs)
    run = FoldedChain(nodes=(2, 3), entry=1, exit=3, count=count, after=frozenset({4}))
    return Folded(Problem(nodes, edges), (run,))


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_folded_problem_has_the_least_values_of_the_unfolded_one(seed, count, hub):
    problem = folded(seed, count, hub)
    whole = problem.unfolded()
    assert len(whole.nodes) == problem.num_nodes == 4 + 2 * count
    frontier = enumerate_problem(*as_lists(whole))
    values, choice = make_solver(problem, 10**6).minimise(weighted(WEIGHTS))
    for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
        assert value == pytest.approx(min(t + weight * m for t, m in frontier))
        time, memory = price(whole, row)
        assert time + weight * memory == pytest.approx(value)
        assert PriceList.of(problem).point(tuple(row))[:2] == (time, memory)


@pytest.mark.parametrize("hub", [False, True])
def test_copies_of_a_run_are_free_to_differ_and_nothing_is_lost(hub):
    problem = folded(1, 40, hub)
    one, other = fast_frontier(problem), fast_frontier(problem.unfolded())
    assert [p[:2] for p in one.points] == [p[:2] for p in other.points]
    positions = problem.positions(0)
    assert any(len({*np.array(p.choice)[positions[:, 0]].tolist()}) > 1 for p in one.points)


def test_the_inside_of_equal_copies_is_chosen_once(monkeypatch):
    problem, chosen = folded(1, 40, True), []
    plain = solver.backward

    def counted(schedule, tables, choice, rows):
        chosen.append(len(choice))
        plain(schedule, tables, choice, rows)

    monkeypatch.setattr(solver, "backward", counted)
    make_solver(problem, 10**6).minimise(weighted(WEIGHTS))
    assert sum(chosen) < 40 * len(WEIGHTS)


def test_many_columns_are_not_told_apart_by_one_number():
    rows = np.array([[2**40, 2**40], [0, 0], [0, 0]])
    first, like = solver._distinct(rows)
    assert rows[first][like].tolist() == rows.tolist()


def test_a_problem_too_wide_to_fold_is_searched_unfolded():
    problem = folded(0, 5, True)
    pinning = make_solver(problem, 1)
    assert pinning.pinned
    values, choice = pinning.minimise(weighted(WEIGHTS))
    for weight, value, row in zip(WEIGHTS, values, choice.tolist(), strict=True):
        time, memory = price(problem.unfolded(), row)
        assert value <= time + weight * memory


def test_a_run_without_matching_ends_is_refused():
    problem = folded(0, 2, False).problem
    with pytest.raises(ProblemError, match="equally many"):
        Folded(problem, (FoldedChain((2, 3), entry=0, exit=3, count=2, after=frozenset({4})),))
    with pytest.raises(ProblemError, match="must hold its exit"):
        Folded(problem, (FoldedChain((2,), entry=1, exit=3, count=2, after=frozenset({4})),))
