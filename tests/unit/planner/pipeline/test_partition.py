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


def test_stages_that_share_a_row_of_costs_are_cut_as_with_rows_of_their_own(monkeypatch):
    random, sorted_sizes, unique = np.random.default_rng(0), [], np.unique
    monkeypatch.setattr(
        module.np, "unique", lambda given: sorted_sizes.append(given.size) or unique(given)
    )
    for places in range(4, 12):
        intervals = Intervals.of(random.random((places, places)) < 0.9)
        times = random.integers(1, 9, len(intervals.begin)) + 0.5
        times[random.random(len(times)) < 0.1] = np.inf
        shared = partition(np.broadcast_to(times, (3, len(times))), intervals, 4)
        in_one_row = sorted_sizes[:]
        sorted_sizes.clear()
        assert shared == partition(np.stack([times] * 3), intervals, 4)
        assert all(size <= len(times) for size in in_one_row)
        sorted_sizes.clear()
