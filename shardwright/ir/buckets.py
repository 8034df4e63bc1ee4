"""Sizes of communication buckets: gradients that are summed, sharded parameters that are gathered.

The passes of step programs and the cost tables use these functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from shardwright.ir.graph import Graph
from shardwright.ir.options.mixed_precision import reduced_bytes

BUCKET_BYTES = 25 * 2**20  # as in torch's own data parallelism (Li et al., VLDB 2020)
_LEAST_SUM_BYTES = 2**18
_SUMS = 8  # of a model that is small enough
_LEAST_GATHER_BYTES = 2**20  # less in a bucket is not worth a message


def gradient_bucket_bytes(total: int) -> int:
    """Size in bytes of a bucket of gradients, of a model with `total` bytes of gradients.

    An eighth, so that the all-reduces of small models too overlap with computation, within 256 KiB
    and 25 MiB.
    """
    return min(BUCKET_BYTES, max(_LEAST_SUM_BYTES, -(-total // _SUMS)))


def sum_bucket_bytes(graph: Graph) -> int:
    """Size in bytes of a bucket of gradients that are summed, of a whole model.

    Along each axis: where most parameters are sharded, the others share one sum at the end of a
    step, as layer norms do in Megatron-LM.
    """
    return gradient_bucket_bytes(sum(reduced_bytes(graph, name) for name in graph.trained))


def gradient_buckets(sizes: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """The buckets of gradients, as indices into `sizes` (bytes, in the order of the forward pass).

    A gradient of at least `most` bytes has a bucket of its own, without a copy. The others fill
    buckets from the end, because the backward pass produces the last ones first.

    >>> gradient_buckets([1, 1, 9, 3, 1, 3], 4)
    ((0,), (1, 3), (2,), (4, 5))
    """
    found: list[tuple[int, ...]] = []
    together: list[int] = []
    for place in reversed(range(len(sizes))):
        if sizes[place] >= most:
            found.append((place,))
            continue
        together.insert(0, place)
        if sum(sizes[i] for i in together) >= most:
            found.append(tuple(together))
            together = []
    return tuple(sorted([*found, tuple(together)] if together else found))


def gather_limit(largest: int) -> int:
    """The most bytes of a bucket of gathered parameters, the largest of which has `largest`.

    Twice the largest, so that prefetched buckets take little memory, within 1 and 25 MiB.
    """
    return max(_LEAST_GATHER_BYTES, min(BUCKET_BYTES, 2 * largest))


def gather_buckets(copies: Iterable[tuple[int, Hashable]], least: int = 0) -> list[list[int]]:
    """The buckets of `copies`, given by bytes and kind in the order in which they are read.

    Copies of one kind that follow one another share a bucket until it is full, of `least` bytes or
    more.

    >>> gather_buckets([(2**20, "a"), (2**20, "a"), (8, "a"), (8, "b")])
    [[0, 1], [2], [3]]
    """
    given = list(copies)
    limit = max(least, gather_limit(max((size for size, _ in given), default=0)))
    found: list[list[int]] = []
    filled, last = 0, None
    for number, (size, kind) in enumerate(given):
        if not found or kind != last or filled + size > limit:
            found.append([])
            filled, last = 0, kind
        found[-1].append(number)
        filled += size
    return found
