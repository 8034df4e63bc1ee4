"""A part of `benchmarks/never_worse` that is quick: published sizes on the smaller machines."""

from itertools import product

import pytest

import shardwright as sw
from benchmarks.never_worse.run import MACHINES, captured, rows
from tests.harness.rotation import rotating

EVERY = product(("alexnet", "vgg16", "mlp-mixer", "lstm lm"), ("4xV100-10G", "2xcpu"))


@pytest.mark.parametrize("model, machine", rotating(EVERY, 4, kinds=lambda case: case[1:]))
def test_no_choice_is_slower_than_a_baseline_that_fits(model, machine):
    found = list(rows(model, machine, sw.search(captured(model), MACHINES[machine])))
    assert len(found) >= 2
    for row in found:
        assert row.peak_bytes <= row.limit_bytes
        assert row.ratio is None or row.ratio <= 1
        assert row.gap >= 0
    assert any(row.ratio is not None for row in found)
