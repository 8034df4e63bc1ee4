"""Halves of tiles that devices along an axis send each other, to zigzag order and back.

Device i of n has the halves 2i and 2i + 1 of a dimension in tiles of neighbours, and the halves i
and 2n − 1 − i in zigzag order (`ir/layout.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from shardwright.ir.layout import chunk, zigzag_runs


class HalfMove(NamedTuple):
    """A half that is sent to `peer` or received from it, and its place in this device's tile."""

    peer: int
    number: int  # among all halves
    start: int
    length: int


def half_moves(
    size: int, ranks: int, rank: int, *, back: bool
) -> tuple[list[HalfMove], list[HalfMove]]:
    """The halves that a device sends and those that it receives, each by peer and then by number.

    Args:
        size: the length of the dimension on all `ranks` together.
        ranks: the number of devices.
        rank: the position of this one.
        back: whether from zigzag order to tiles of neighbours.

    >>> sent, received = half_moves(8, 2, 0, back=False)
    >>> sent[1], received[1]
    (HalfMove(peer=1, number=1, start=2, length=2), HalfMove(peer=1, number=3, start=2, length=2))
    """
    last = 2 * ranks - 1
    neighbours, zigzag = (2 * rank, 2 * rank + 1), (rank, last - rank)
    _, length = chunk(size, ranks, rank)
    early = -(-length // 2)
    tile = [(0, early), (early, length - early)]
    (_, first), (_, second) = zigzag_runs(size, ranks, rank)
    ordered = [(0, first), (first, second)]
    here = sorted(
        HalfMove(min(number, last - number), number, *place)
        for number, place in zip(neighbours, tile, strict=True)
    )
    there = sorted(
        HalfMove(number // 2, number, *place) for number, place in zip(zigzag, ordered, strict=True)
    )
    return (there, here) if back else (here, there)
