"""A part of `benchmarks/never_worse` that is quick: published sizes on the smaller machines."""

import pytest

import shardwright as sw
from benchmarks.never_worse.run import MACHINES, captured, rows


@pytest.mark.parametrize("model", ["alexnet", "vgg16", "mlp-mixer", "lstm lm"])
def test_no_choice_is_slower_than_a_baseline_that_fits(model):
    graph = captured(model)
    for machine in ("4xV100-10G", "2xcpu"):
        found = list(rows(model, machine, sw.search(graph, MACHINES[machine])))
        assert len(found) >= 2
        for row in found:
            assert row.peak_bytes <= row.limit_bytes
            assert row.ratio is None or row.ratio <= 1
            assert row.gap >= 0
        assert any(row.ratio is not None for row in found)
