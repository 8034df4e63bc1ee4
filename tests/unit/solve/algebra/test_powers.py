import numpy as np
import pytest

from shardwright.solve.algebra.powers import paths, power, product


@pytest.mark.parametrize("exponent", [1, 2, 3, 5, 7, 12, 29])
def test_a_power_is_the_repeated_product_and_its_ways_cost_what_it_says(exponent):
    rng = np.random.default_rng(exponent)
    table = rng.integers(0, 50, (3, 2, 4, 4)).astype(float)
    found = power(table, exponent)
    plain = table
    for _ in range(exponent - 1):
        plain = product(plain, table)
    assert np.array_equal(found.table, plain)
    index = tuple(axis.ravel() for axis in np.indices((3, 2, 4, 4)))
    steps = paths(found, index[:2], index[2], index[3])
    assert steps.shape == (96, exponent + 1)
    cost = sum(table[(*index[:2], steps[:, i], steps[:, i + 1])] for i in range(exponent))
    assert np.array_equal(cost, plain[index])


def test_a_forbidden_way_stays_forbidden():
    table = np.array([[[0.0, np.inf], [np.inf, 1.0]]])
    assert power(table, 6).table[0].tolist() == [[0.0, np.inf], [np.inf, 6.0]]
