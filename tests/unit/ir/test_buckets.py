"""Every tensor is in one bucket, and buckets have the sizes that are asked for."""

from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.buckets import (
    gather_buckets,
    gather_limit,
    gradient_bucket_bytes,
    gradient_buckets,
)

MIB = 2**20


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_gradients_fill_buckets_from_the_end_and_none_is_lost(sizes, most):
    found = gradient_buckets(sizes, most)
    assert sorted(i for bucket in found for i in bucket) == [*range(len(sizes))]
    large = [i for i, size in enumerate(sizes) if size >= most]
    assert all((i,) in found for i in large)
    # The backward pass makes the last gradients first; what it makes at the end may be less.
    others = sorted((b for b in found if b[0] not in large), reverse=True)
    assert [i for b in others for i in b[::-1]] == [
        i for i in reversed(range(len(sizes))) if i not in large
    ]
    for at, bucket in enumerate(others):
        total = sum(sizes[i] for i in bucket)
        assert total >= most or at == len(others) - 1
        assert total - sizes[bucket[0]] < most, "it was full before"


@given(
    st.lists(st.tuples(st.integers(0, 3 * MIB), st.sampled_from("ab")), max_size=12),
    st.sampled_from([0, 8 * MIB]),
)
def test_copies_share_a_bucket_with_their_neighbours_until_it_is_full(copies, least):
    found = gather_buckets(copies, least)
    assert [i for bucket in found for i in bucket] == [*range(len(copies))]
    limit = max(least, gather_limit(max((size for size, _ in copies), default=0)))
    totals = [sum(copies[i][0] for i in bucket) for bucket in found]
    assert all(t <= limit for t in totals)
    for bucket, following, total in zip(found, found[1:], totals, strict=False):
        size, kind = copies[following[0]]
        assert total + size > limit or kind != copies[bucket[0]][1]
    assert all(len({copies[i][1] for i in bucket}) == 1 for bucket in found)


def test_sizes_have_bounds():
    assert [gradient_bucket_bytes(n) for n in (0, 8 * MIB + 1, 2**40)] == [
        MIB // 4,
        MIB + 1,
        25 * MIB,
    ]
    assert [gather_limit(n) for n in (0, MIB, 2**40)] == [MIB, 2 * MIB, 25 * MIB]
