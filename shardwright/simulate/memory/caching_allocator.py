"""Simulates torch's caching allocator on GPUs: what it reserves of a device for given requests.

Requests are rounded up to multiples of 512 bytes. Memory comes from the driver in segments: of
2 MiB for requests up to 1 MiB, of 20 MiB for those below 10 MiB, else of the request rounded up to
2 MiB. A request takes the smallest free block that holds it, and what is left of a block stays free
if it is large enough. Neighbouring free blocks of a segment are joined, and segments are kept
(torch's notes on CUDA semantics, "Memory management"; the constants are those of torch 2).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

_ROUND = 512
_SMALL, _MEDIUM = 2**20, 10 * 2**20  # the largest small request; from where segments are exact
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _LARGE_ROUND = 2 * 2**20, 20 * 2**20, 2 * 2**20


@final
class Chunk:
    """A part of a segment at `start`, between its neighbours; in use or free."""

    __slots__ = ("after", "before", "free", "number", "size", "small")

    def __init__(self, number: int, size: int, small: bool) -> None:
        self.number, self.size, self.small = number, size, small
        self.free = False
        self.before: Chunk | None = None
        self.after: Chunk | None = None


_Free = tuple[int, int, Chunk]  # size, number, and the chunk; numbers are unique


@final
class CachingAllocator:
    """Hands out chunks of segments; `reserved` are the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[_Free]] = {True: [], False: []}  # by whether requests are small
        self._count = 0

    def take(self, size: int) -> Chunk:
        """A chunk of at least so many bytes."""
        wanted = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = wanted <= _SMALL
        free = self._free[small]
        at = bisect_left(free, (wanted, -1))
        chunk = free.pop(at)[2] if at < len(free) else self._segment(wanted, small)
        chunk.free = False
        left = chunk.size - wanted
        if left >= _ROUND if small else left > _SMALL:
            rest = self._chunk(left, small)
            rest.before, rest.after = chunk, chunk.after
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.after, chunk.size = rest, wanted
            self._keep(rest)
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Free a chunk and join it with free neighbours."""
        after, before = chunk.after, chunk.before
        if after is not None and after.free:
            self._forget(after)
            _join(chunk, after)
        if before is not None and before.free:
            self._forget(before)
            _join(before, chunk)
            chunk = before
        self._keep(chunk)

    def _segment(self, wanted: int, small: bool) -> Chunk:
        if small:
            size = _SMALL_SEGMENT
        elif wanted < _MEDIUM:
            size = _MEDIUM_SEGMENT
        else:
            size = -(-wanted // _LARGE_ROUND) * _LARGE_ROUND
        self.reserved += size
        return self._chunk(size, small)

    def _chunk(self, size: int, small: bool) -> Chunk:
        self._count += 1
        return Chunk(self._count, size, small)

    def _keep(self, chunk: Chunk) -> None:
        chunk.free = True
        insort(self._free[chunk.small], (chunk.size, chunk.number, chunk))

    def _forget(self, chunk: Chunk) -> None:
        free = self._free[chunk.small]
        del free[bisect_left(free, (chunk.size, chunk.number))]


def _join(chunk: Chunk, after: Chunk) -> None:
    """Add the neighbour behind a chunk to it."""
    chunk.size += after.size
    chunk.after = after.after
    if after.after is not None:
        after.after.before = chunk


class Request(NamedTuple):
    """A block of `bytes` bytes is taken, or given back."""

    block: int
    bytes: int
    taken: bool


def reserved_bytes(before: Iterable[int], step: Sequence[Request], state: Iterable[int]) -> int:
    """Bytes that the allocator has reserved after two steps, the second of which has all state.

    Args:
        before: sizes of tensors that are there before the first step.
        step: what a step requests; what it does not give back is freed at its end.
        state: sizes of tensors that the optimizer makes at the end of the first step.
    """
    allocator = CachingAllocator()
    for size in before:
        allocator.take(size)
    for made in (state, ()):
        alive: dict[int, Chunk] = {}
        for block, size, taken in step:
            if taken:
                alive[block] = allocator.take(size)
            else:
                allocator.give(alive.pop(block))
        for size in made:
            allocator.take(size)
        for chunk in alive.values():
            allocator.give(chunk)
    return allocator.reserved
