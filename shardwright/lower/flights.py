"""Memory of sharded parameters gathered in buckets, one ahead, and of their gradients.

It follows `runtime.gathering`, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, final

from shardwright.ir.graph import ITEM_BYTES
from shardwright.lower.heap import Block, Use
from shardwright.lower.program import Gather, Prefetch, Redistribute
from shardwright.lower.values import View, contiguous_strides

if TYPE_CHECKING:
    from shardwright.lower.lifetimes import Walk


@final
class Flight:
    """The gather of a bucket, and the copies that the backward pass wants again."""

    def __init__(self, walk: Walk, one: Prefetch, before: Flight | None) -> None:
        self.walk, self.parts, self.before = walk, one.parts, before
        self.ranks = walk.sizes[one.axis]
        self.tiles = [walk.views[part.value] for part in one.parts]
        self.users: Counter[int] = Counter()
        self._sent: tuple[list[int], Block] | None = None
        self._again: dict[int, View] = {}

    def start(self) -> None:
        """Send for all copies."""
        self._send(list(range(len(self.parts))))

    def arrive(self) -> dict[int, View]:
        """The copies that were sent for; they are the caller's."""
        assert self._sent is not None
        heap = self.walk.heap
        numbers, buffer = self._sent
        self._sent = None
        copies = {}
        for number in numbers:
            part, dtype = self.parts[number], self._dtype(number)
            if len(numbers) == 1 and _as_sent(part, self.ranks):
                block = heap.own(buffer)
                heap.becomes(block, Use.WORKSPACE)
            else:
                block = heap.new(prod(part.after) * ITEM_BYTES[dtype])
            copies[number] = View(block, part.after, contiguous_strides(part.after), dtype)
        heap.drop(buffer)
        return copies

    def again(self, number: int) -> View:
        """A copy that an operator wants again, which owns it too."""
        if number not in self._again and self._sent is not None:
            self._again.update(self.arrive())
        if number not in self._again:
            self.start_again()
            self._again.update(self.arrive())
        if self.before is not None:
            self.before.start_again()
        self.users[number] -= 1
        if self.users[number] <= 0:
            return self._again.pop(number)
        copy = self._again[number]
        self.walk.heap.own(copy.block)
        return copy

    def start_again(self) -> None:
        """Send for the copies that are wanted again and not there, if any is."""
        wanted = [n for n, users in self.users.items() if users > 0 and n not in self._again]
        if wanted and self._sent is None:
            self._send(sorted(wanted))

    def _send(self, numbers: Sequence[int]) -> None:
        """Tiles are put where they will be among those of all ranks."""
        heap = self.walk.heap
        rooms = (_room(self.parts[n], self.ranks) * ITEM_BYTES[self._dtype(n)] for n in numbers)
        size = sum(rooms) * self.ranks
        buffer = heap.new(size, Use.COMMUNICATION)
        self._sent = list(numbers), buffer

    def _dtype(self, number: int) -> str:
        cast = self.parts[number].cast
        return cast[0] if cast else self.tiles[number].dtype


def prefetch(walk: Walk, one: Prefetch) -> None:
    """A bucket of copies sets out."""
    walk.heap.where = f"gather of {one.parts[0].value}, forward"
    before = walk.flights[one.before] if one.before else None
    flight = walk.flights[one.flight] = Flight(walk, one, before)
    flight.start()


def gather(walk: Walk, one: Gather) -> None:
    """Its copies arrive; their gradients leave in one buffer, and arrive as parts of one."""
    heap = walk.heap
    heap.where = f"gather of {one.parts[0].value}, forward"
    flight, ranks = walk.flights[one.flight], walk.sizes[one.axis]
    grad = any(walk.views[part.value].grad for part in one.parts)
    for number, view in flight.arrive().items():
        view.grad = grad
        name = one.parts[number].result
        walk.views[name] = view
        walk.flown[name] = flight, number
    if not grad:
        return

    def back() -> None:
        found = [(part, walk.taken(part.result)) for part in one.parts]
        came = [(part, gradient) for part, gradient in found if gradient is not None]
        if not came:
            return
        if earlier := walk.works.pop(one.works, None):
            heap.drop(earlier)
        dtype = came[0][0].cast[1] if came[0][0].cast else came[0][1].dtype
        item, copies, size = ITEM_BYTES[dtype], [], 0
        for part, gradient in came:
            copies += _pieces(walk, part, gradient, dtype, ranks)
            size += _room(part, ranks) * item
        given = heap.new(size * ranks, Use.COMMUNICATION)
        for block in copies:
            heap.drop(block)
        own = heap.new(size, Use.COMMUNICATION)
        works = heap.own(given)  # until the sum is waited for
        if one.summed:
            heap.drop(works)
        else:
            walk.works[one.works] = works
        heap.drop(given)
        for part, gradient in came:
            heap.drop(gradient.block)
            strides = contiguous_strides(part.before)
            walk.give(part.value, View(heap.own(own), part.before, strides, dtype))
        heap.drop(own)

    walk.node(f"gradients of {one.parts[0].value}", tuple(part.result for part in one.parts), back)


def _pieces(walk: Walk, part: Redistribute, gradient: View, dtype: str, ranks: int) -> list[Block]:
    """What is made of a gradient before it is sent: its cast, or its tiles and their padding."""
    heap, item = walk.heap, ITEM_BYTES[dtype]
    (there,) = part.forward
    whole = prod(there.whole)
    made = [heap.new(whole * item)] if dtype != gradient.dtype else []
    if not gradient.contiguous or prod(there.whole[: there.src]) > 1:
        tiles = heap.new(whole * item)
        for block in made:
            heap.drop(block)
        made = [tiles]
    if padding := _room(part, ranks) * ranks - whole:
        made.append(heap.new(padding * item))
    return made


def _as_sent(part: Redistribute, ranks: int) -> bool:
    """Whether the ranks' tiles, one after the other, are the copy."""
    (there,) = part.forward
    return there.whole[there.src] % ranks == 0 and prod(there.whole[: there.src]) == 1


def _room(part: Redistribute, ranks: int) -> int:
    """Elements of the largest tile."""
    (there,) = part.forward
    long = there.whole[there.src]
    return -(-long // ranks) * (prod(there.whole) // long)
