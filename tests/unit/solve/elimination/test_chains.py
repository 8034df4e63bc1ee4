import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import ProblemError, price
from tests.harness.chain_frontier import chain_frontier
from tests.harness.generators import as_lists, problems, random_problem
from tests.harness.oracles import enumerate_problem

chains = problems(shapes=("chain", "lone"))


def costs(points):
    return {(p.time, p.memory) for p in points}


@given(chains, st.none() | st.integers(0, 40))
def test_a_chain_equals_enumeration(problem, limit):
    whole = enumerate_problem(*as_lists(problem))
    found = chain_frontier(problem, memory_limit=limit)
    assert costs(found) == {c for c in whole if limit is None or c[1] <= limit}
    assert all(price(problem, p.choice) == p[:2] for p in found)


def test_a_long_chain_equals_elimination():
    problem = random_problem([(i, i + 1) for i in range(39)], 40, 6, seed=3)
    assert costs(chain_frontier(problem)) == costs(exact_frontier(problem).points)


def test_an_edge_that_skips_is_refused():
    problem = random_problem([(0, 1), (1, 2), (2, 0)], 3, 2, seed=0)
    with pytest.raises(ProblemError, match="edge 2 -> 0 skips nodes"):
        chain_frontier(problem)
