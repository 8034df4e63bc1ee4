import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import price
from shardwright.solve.gaps.single_changes import Moves
from tests.harness.generators import problems
from tests.harness.oracles import INF


@given(problems(), st.randoms(use_true_random=False))
def test_every_move_adds_what_the_price_says(problem, random):
    start = [random.randrange(k) for k in problem.sizes]
    time, memory = price(problem, start)
    if time == INF:
        return
    prices = PriceList.of(problem)
    moves = Moves.of(prices)
    assert len(moves.node) == sum(problem.sizes)
    added = zip(*moves.costs(prices, np.array(start)), strict=True)
    for node, choice, (t, m) in zip(moves.node, moves.choice, added, strict=True):
        changed = [int(choice) if i == node else k for i, k in enumerate(start)]
        assert price(problem, changed) == (time + t, memory + m)
