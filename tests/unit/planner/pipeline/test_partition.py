"""Bounds of the slowest stage: all costs are tried where they are few, and not sorted else.

Partitions themselves are compared with enumeration in `test_stage_assignment.py`.
"""

import numpy as np
import pytest

from shardwright.planner.pipeline import partition as module
from shardwright.planner.pipeline.partition import Intervals, partition


@pytest.mark.parametrize("kinds", [5, 10**6])
def test_many_different_costs_are_not_sorted(monkeypatch, kinds):
    random, places, sizes = np.random.default_rng(0), 80, []
    intervals = Intervals.of(np.ones((places, places), bool))
    costs = 1.0 + random.integers(kinds, size=(3, len(intervals.begin)))
    unique = np.unique

    def counted(given):
        sizes.append(len(given))
        return unique(given)

    monkeypatch.setattr(module.np, "unique", counted)
    found = partition(costs, intervals, 4)
    assert intervals.end[found][-1] == places - 1
    assert (max(sizes) > 2000) == (kinds == 5)
