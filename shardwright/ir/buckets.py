"""Copies of sharded parameters that travel together: which, by their sizes.

The lowered program gathers so, the timeline shows it, and prices assume it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from shardwright.ir.redistribution import BUCKET_BYTES

_LEAST_BYTES = 2**20  # less in a bucket is not worth a message


def gather_limit(largest: int) -> int:
    """Bytes that a bucket of gathered copies holds at most, of which one has `largest`.

    Twice the largest, so that what is on its way does not take much memory, within 1 and 25 MiB.
    """
    return max(_LEAST_BYTES, min(BUCKET_BYTES, 2 * largest))


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
