import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.algebra import exact_sums as module
from shardwright.solve.algebra.exact_sums import ExactSums

SECONDS = st.one_of(
    st.floats(0, 1e4, allow_subnormal=False),
    st.floats(1e-9, 1e-3),
    st.sampled_from([0.0, math.inf, 0.1, 2.0**70]),
)


@given(st.lists(SECONDS, min_size=1, max_size=40), st.data())
def test_sums_are_those_of_fsum(values, data):
    rows = data.draw(st.lists(st.lists(st.integers(0, len(values) - 1), min_size=7, max_size=7)))
    entries = np.array(rows, np.int64).reshape(len(rows), 7)
    found = ExactSums(np.array(values)).of(entries)
    assert found.tolist() == [math.fsum(values[i] for i in row) for row in rows]


@pytest.mark.parametrize("values", [[1.0, 2.0**-52, 2.0**-53], [3.0, 1e-300, 1e300], [5e-324, 1.0]])
def test_numbers_far_apart_round_once(values):
    entries = np.array([[0, 1, 2, 2, 1], [1, 1, 1, 0, 0]]) % len(values)
    expected = [math.fsum(values[i] for i in row) for row in entries.tolist()]
    assert ExactSums(np.array(values)).of(entries).tolist() == expected


def test_blocks_of_rows_are_put_together(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 8)
    values = np.linspace(0.1, 0.9, 5)
    entries = np.arange(30).reshape(10, 3) % 5
    assert ExactSums(values).of(entries).tolist() == [
        math.fsum(values[i] for i in row) for row in entries
    ]
