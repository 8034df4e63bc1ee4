from unittest import mock

from hypothesis import given

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import price
from shardwright.solve.frontier.sweep import sweep
from shardwright.solve.gaps import local_search as module
from shardwright.solve.gaps.gap_heuristics import fill_gaps
from shardwright.solve.gaps.local_search import local_search
from tests.harness.generators import as_lists, layered_problem, problems, random_problem
from tests.harness.oracles import enumerate_problem, is_frontier


def costs(points):
    return {p[:2] for p in points}


def test_every_point_is_tried_once():
    problem = layered_problem(2, 4)
    with mock.patch.object(module, "_better", wraps=module._better) as better:
        found = local_search(problem, sweep(problem).points, max_priced=50_000)
    tried = [call.args[2][:2] for call in better.call_args_list]
    assert len(tried) == len(set(tried)) and set(tried) >= costs(found)


@given(problems())
def test_polishing_is_never_worse_and_prices_are_true(problem):
    before = sweep(problem).points
    after = local_search(problem, before)
    assert is_frontier(after)
    assert all(price(problem, p.choice) == p[:2] for p in after)
    assert all(any(t <= p.time and m <= p.memory for t, m in costs(after)) for p in before)


@given(problems(shapes=("lone",)))
def test_without_edges_the_whole_frontier_is_found(problem):
    found = local_search(problem, sweep(problem).points)
    assert costs(found) == enumerate_problem(*as_lists(problem))


def test_most_of_a_small_frontier_is_found():
    problem = random_problem([(i, i + 1) for i in range(11)], 12, 4, seed=6)
    exact = costs(exact_frontier(problem).points)
    found = costs(local_search(problem, fill_gaps(problem, sweep(problem).points)))
    assert len(exact & found) >= 0.75 * len(exact)


def test_points_and_work_stay_within_what_was_asked():
    problem = layered_problem(4, 6)
    before = sweep(problem).points
    assert local_search(problem, before, max_priced=0) == before
    short, long = (local_search(problem, before, max_priced=10**n) for n in (4, 7))
    assert len(before) < len(short) < len(long)
    few = local_search(problem, before, max_points=len(before) + 10)
    assert len(before) < len(few) <= len(before) + 10


def test_no_points_stay_none():
    assert local_search(layered_problem(1, 2), ()) == ()
