import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardwright.solve.frontier.frontier_sampling import spaced

costs = st.lists(st.tuples(st.integers(1, 999), st.integers(1, 999)), min_size=1, max_size=30)


@given(costs, st.integers(2, 9), st.integers(0, 5))
def test_what_is_kept_is_a_frontier_with_both_ends_that_no_yardstick_beats(points, most, keep_near):
    keep_near = points[:keep_near]
    kept = spaced(points, points, most, 0.01, keep_near)
    assert kept == sorted(kept) and all(a[1] > b[1] for a, b in itertools.pairwise(kept))
    assert kept[0] == min(points) and kept[-1][1] == min(memory for _, memory in points)
    for time, memory in keep_near:
        assert any(t <= time and m <= memory for t, m in kept)
    assert len(kept) <= max(most, 2 + len(keep_near))


def test_near_duplicates_are_dropped():
    points = [(1.0, 1000), (1.0001, 999), (1.5, 998), (2.0, 500)]
    assert spaced(points, points, 9, 0.01) == [(1.0, 1000), (1.5, 998), (2.0, 500)]
