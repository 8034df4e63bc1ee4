from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.algebra import frontier
from shardwright.solve.algebra.frontier import Frontiers, product, reduce, singletons, take, union
from tests.harness.oracles import INF, is_frontier, non_dominated

costs = st.tuples(st.integers(0, 9), st.integers(0, 9))
cells = st.lists(st.lists(costs, max_size=6), min_size=1, max_size=4)


def reduced(groups, limit=None):
    """Frontiers of several lists of (time, memory); the trace numbers all candidates."""
    flat = [cost for group in groups for cost in group]
    starts = np.concatenate(([0], np.cumsum([len(group) for group in groups])))
    time = np.array([t for t, _ in flat], np.float64)
    memory = np.array([m for _, m in flat], np.int64)
    return reduce(starts, time, memory, (np.arange(len(flat)),), limit)


def lists(table):
    both = list(zip(table.time.tolist(), table.memory.tolist(), strict=True))
    return [both[a:b] for a, b in pairwise(table.starts.tolist())]


@given(cells)
def test_reduce_keeps_what_no_other_of_its_own_frontier_beats(groups):
    found = lists(reduced(groups))
    assert [set(f) for f in found] == [non_dominated(g) for g in groups]
    assert all(is_frontier(f) for f in found)


@given(cells)
def test_reduce_covers_its_input_and_is_idempotent(groups):
    once = reduced(groups)
    for group, found in zip(groups, lists(once), strict=True):
        assert all(any(t <= a and m <= b for t, m in found) for a, b in group)
    assert lists(reduced(lists(once))) == lists(once)


@given(cells)
def test_traces_point_at_the_first_of_equal_candidates(groups):
    flat = [(i, cost) for i, group in enumerate(groups) for cost in group]
    found = reduced(groups)
    cell = np.repeat(np.arange(len(groups)), found.lengths).tolist()
    for i, t, m, place in zip(
        cell, found.time.tolist(), found.memory.tolist(), found.trace[0].tolist(), strict=True
    ):
        assert flat.index((i, (t, m))) == place


@given(cells, st.integers(0, 9))
def test_a_limit_drops_what_is_above_it(groups, limit):
    below = [[c for c in group if c[1] <= limit] for group in groups]
    assert lists(reduced(groups, limit)) == lists(reduced(below))


@given(cells, cells)
@pytest.mark.parametrize("at_once", [1 << 21, 3])
def test_a_product_is_all_sums_whether_made_at_once_or_piecemeal(at_once, left, right):
    lefts, rights = reduced(left), reduced(right)
    which = np.arange(len(left))[::-1] % len(right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "_CANDIDATES_AT_ONCE", at_once)
        found = product(take(lefts, np.arange(len(left))), rights, which)
    assert [set(f) for f in lists(found)] == [
        non_dominated({(a + c, b + d) for a, b in left[i] for c, d in right[j]})
        for i, j in enumerate(which)
    ]
    i, j = found.trace
    assert (lefts.time[i] + rights.time[j]).tolist() == found.time.tolist()
    assert (lefts.memory[i] + rights.memory[j]).tolist() == found.memory.tolist()


@given(cells.filter(lambda groups: len(groups) % 2 == 0))
def test_union_merges_neighbours(groups):
    found = union(reduced(groups), 2)
    assert [set(f) for f in lists(found)] == [
        non_dominated(a + b) for a, b in zip(groups[::2], groups[1::2], strict=True)
    ]


def test_forbidden_entries_make_empty_frontiers():
    table = singletons(np.array([[1.0, INF], [2.0, 3.0]]), np.array([[5, 0], [9, 1]]), limit=8)
    assert lists(table) == [[(1.0, 5)], [], [], [(3.0, 1)]]


def test_memories_too_far_apart_to_be_offset_are_ranked():
    groups = [[(1, 2**52), (2, 0)]] * 2**12
    assert lists(reduced(groups)) == [[(1.0, 2**52), (2.0, 0)]] * 2**12


def test_take_repeats_and_reorders():
    table = reduced([[(1, 2), (2, 1)], [], [(4, 4)]])
    taken = take(table, np.array([2, 0, 0, 1]))
    assert lists(taken) == [[(4, 4)], [(1, 2), (2, 1)], [(1, 2), (2, 1)], []]
    assert taken.trace[0].tolist() == [2, 0, 1, 0, 1]
    assert isinstance(taken, Frontiers) and len(taken) == 4
