"""Every tensor is in one bucket, and buckets have the sizes that are asked for."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir.buckets import (
    enough_bytes,
    gather_buckets,
    gather_limit,
    gradient_bucket_bytes,
    gradient_buckets,
)

MIB = 2**20


_GRADIENTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["w", "0.a.w", "1.a.w"])), max_size=12
)


@given(_GRADIENTS, st.integers(1, 12))
def test_gradients_fill_buckets_from_the_end_and_none_is_lost(gradients, most):
    found = gradient_buckets(gradients, most)
    sizes, _ = zip(*gradients, strict=True) if gradients else ((), ())
    assert sorted(i for bucket in found for i in bucket) == [*range(len(sizes))]
    large = [i for i, size in enumerate(sizes) if size >= most]
    assert all((i,) in found for i in large)
    # The backward pass makes the last gradients first; what it makes at the end may be less.
    others = sorted((b for b in found if b[0] not in large), reverse=True)
    assert [i for b in others for i in b[::-1]] == [
        i for i in reversed(range(len(sizes))) if i not in large
    ]
    layers = [_layer(name) for _, name in gradients]
    for at, bucket in enumerate(others):
        total = sum(sizes[i] for i in bucket)
        half = total >= most / 2
        ended = (
            half and layers[bucket[0]] != layers[others[at + 1][-1]] if others[at + 1 :] else True
        )
        assert total >= most or ended
        for j, i in pairwise(bucket):
            so_far = sum(sizes[k] for k in bucket if k >= i)
            assert so_far < most / 2 or layers[j] == layers[i]
        for j in bucket:
            before = sum(sizes[i] for i in bucket if i > j)
            left = sum(sizes[i] for i in _of_layer(layers, j) if i <= j and i not in large)
            assert before < most or left < most / 2, "it was full before"


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3 * MIB), st.sampled_from(["w", "0.a.w", "a.0.b.1.c.w", "a.0.b.2.w"])
        ),
        max_size=12,
    ),
    st.sampled_from([0, 8 * MIB]),
)
def test_copies_share_a_bucket_with_their_neighbours_until_it_is_full(copies, least):
    found = gather_buckets(copies, least)
    assert [i for bucket in found for i in bucket] == [*range(len(copies))]
    limit = max(least, gather_limit(max((size for size, _ in copies), default=0)))
    layers = [_layer(name) for _, name in copies]
    enough = enough_bytes(max((size for size, _ in copies), default=0), least)
    totals = [sum(copies[i][0] for i in bucket) for bucket in found]
    for bucket in found:
        for i in bucket:
            before = sum(copies[k][0] for k in bucket if k < i)
            left = sum(copies[k][0] for k in _of_layer(layers, i) if k >= i)
            fits = before + copies[i][0] <= limit
            assert fits or (left < enough and layers[i] == layers[i - 1])
    for bucket, following, total in zip(found, found[1:], totals, strict=False):
        full = total + copies[following[0]][0] > limit
        assert full or (total >= enough and layers[bucket[-1]] != layers[following[0]])
        for i, j in pairwise(bucket):
            so_far = sum(copies[k][0] for k in bucket if k <= i)
            assert so_far < enough or layers[j] == layers[i]


def _of_layer(layers, place):
    """The indices of the neighbours of a tensor that are of its layer, and its own."""
    first = last = place
    while first and layers[first - 1] == layers[place]:
        first -= 1
    while last + 1 < len(layers) and layers[last + 1] == layers[place]:
        last += 1
    return range(first, last + 1)


def _layer(name):
    return {"0.a.w": "0", "1.a.w": "1", "a.0.b.1.c.w": "a.0.b.1", "a.0.b.2.w": "a.0"}.get(name, "")


def test_equal_layers_have_equal_buckets():
    layer = [("attention.w", 3 * MIB), ("norm.w", 64), ("mlp.w", 7 * MIB)]
    tensors = [(MIB, "embedding.w")]
    tensors += [(size, f"layers.{n}.{name}") for n in range(4) for name, size in layer]
    found = gather_buckets(tensors)
    assert found == [[*range(4)], *([4 + 3 * n + i for i in range(3)] for n in range(3))]
    summed = gradient_buckets(tensors, 12 * MIB)
    assert summed == ((0,), *(tuple(1 + 3 * n + i for i in range(3)) for n in range(4)))
    # What is left of a layer when a bucket is full goes there, too.
    layer = [("key.w", 2 * MIB), ("value.w", 2 * MIB), ("gate.w", MIB // 2)]
    tensors = [(size, f"layers.{n}.{name}") for n in range(3) for name, size in layer]
    assert gather_buckets(tensors) == [[3 * n + i for i in range(3)] for n in range(3)]
    assert gradient_buckets(tensors, 3 * MIB) == tuple(
        tuple(3 * n + i for i in range(3)) for n in range(3)
    )
    # A matrix that is larger than a bucket stays alone.
    tensors = [(40 * MIB, "layers.0.mlp.w"), (64, "layers.0.norm.w")]
    assert gather_buckets(tensors) == [[0], [1]]
    # Layers of norms alone share a message.
    norms = [(64, f"layers.{n}.norm.w") for n in range(4)]
    assert gather_buckets(norms) == [[*range(4)]]
    assert gradient_buckets(norms, 25 * MIB) == ((0, 1, 2, 3),)


def test_sizes_have_bounds():
    assert [gradient_bucket_bytes(n) for n in (0, 8 * MIB + 1, 2**40)] == [
        MIB // 4,
        MIB + 1,
        25 * MIB,
    ]
    sizes = 0, 2**16, MIB // 4, MIB, 2**40
    assert [gather_limit(n) for n in sizes] == [25 * MIB, 25 * MIB, MIB, 2 * MIB, 25 * MIB]
    assert [enough_bytes(n) for n in (2**16, MIB, 2**40)] == [12.5 * MIB, MIB, 4 * MIB]
