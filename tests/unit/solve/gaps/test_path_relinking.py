from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import price
from shardwright.solve.gaps.path_relinking import components, relink
from tests.harness.generators import problems, random_problem
from tests.harness.oracles import INF


@given(problems(), st.randoms(use_true_random=False))
def test_every_step_of_a_walk_costs_its_price(problem, random):
    start, goal = ([random.randrange(k) for k in problem.sizes] for _ in range(2))
    if price(problem, start)[0] == INF:
        return
    rank = [random.randrange(3) for _ in problem.nodes]
    found = relink(PriceList.of(problem), np.array(start), np.array(goal), np.array(rank))
    rows = found.assignments(np.arange(len(found.time))).tolist()
    time, memory = price(problem, start)
    assert rows[0] == start and rows[-1] == goal
    assert [price(problem, row) for row in rows] == [
        (time + t, memory + m) for t, m in zip(found.time, found.memory, strict=True)
    ]


def test_components_join_members_only():
    pairs = [(0, 1), (1, 2), (3, 2), (4, 5), (6, 0)]
    prices = PriceList.of(random_problem(pairs, 7, 2, seed=0))
    member = np.array([True, True, False, True, True, True, True])
    assert components(prices, member).tolist() == [0, 0, 2, 3, 4, 4, 0]


def test_components_of_a_long_chain_are_one():
    order = np.random.default_rng(0).permutation(300)
    prices = PriceList.of(random_problem(list(pairwise(order)), 300, 1, seed=0))
    assert not components(prices, np.ones(300, bool)).any()
