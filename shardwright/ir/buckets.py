"""Sizes of communication buckets: gradients that are summed, sharded parameters that are gathered.

The lowered program does so, the timeline shows it, and prices assume it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

BUCKET_BYTES = 25 * 2**20  # as in torch's own data parallelism (Li et al., VLDB 2020)
_LEAST_SUM_BYTES = 2**18
_SUMS = 8  # of a model that is small enough
_LEAST_GATHER_BYTES = 2**20  # less in a bucket is not worth a message
ALONE_BYTES = 2**20  # of a copy that is worth one on CPUs


def gradient_bucket_bytes(total: int) -> int:
    """Bytes of gradients that are summed in one buffer, of `total` bytes.

    An eighth, so that small models too sum while they compute, but from 256 KiB to 25 MiB.
    """
    return min(BUCKET_BYTES, max(_LEAST_SUM_BYTES, -(-total // _SUMS)))


def gradient_buckets(sizes: Sequence[int], limit: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Which gradients are summed in one buffer, of `sizes` bytes in the order of their reading.

    One of at least `limit` bytes is summed alone, where it is. The others fill buckets up to that
    from the end, as the backward pass knows the last ones first.

    >>> gradient_buckets([1, 1, 9, 3, 1, 3], limit=4)
    ((0,), (1, 3), (2,), (4, 5))
    """
    most = gradient_bucket_bytes(sum(sizes)) if limit is None else limit
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
    """Bytes that a bucket of gathered copies holds at most, of which one has `largest`.

    Twice the largest, so that what is on its way does not take much memory, within 1 and 25 MiB.
    """
    return max(_LEAST_GATHER_BYTES, min(BUCKET_BYTES, 2 * largest))


def gather_buckets(copies: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """The buckets of `copies`, given by bytes and kind in the order in which they are read.

    Copies of one kind that follow one another share a bucket until it is full.

    >>> gather_buckets([(2**20, "a"), (2**20, "a"), (8, "a"), (8, "b")])
    [[0, 1], [2], [3]]
    """
    given = list(copies)
    limit = gather_limit(max((size for size, _ in given), default=0))
    found: list[list[int]] = []
    held, last = 0, None
    for number, (size, kind) in enumerate(given):
        if not found or kind != last or held + size > limit:
            found.append([])
            held, last = 0, kind
        found[-1].append(number)
        held += size
    return found


def gather_messages(copies: Iterable[tuple[int, bool]], *, on_cpu: bool) -> list[list[int]]:
    """The messages of one bucket, of copies given by bytes and by whether they arrive as they are.

    That they do whose tiles, one rank's after the other's, are the copy. Of several that share a
    message each is copied out of it; a large one on CPUs takes longer to copy than to send alone.

    >>> gather_messages([(2**20, True), (8, True), (2**21, True), (8, False)], on_cpu=True)
    [[0], [1, 3], [2]]
    """
    found: list[list[int]] = []
    together: list[int] = []
    for number, (size, as_sent) in enumerate(copies):
        if on_cpu and as_sent and size >= ALONE_BYTES:
            found.append([number])
            continue
        if not together:
            found.append(together)
        together.append(number)
    return found
