"""Memory of bucketed parameter all-gathers, prefetched one bucket ahead, and of their gradients.

It follows `runtime.gathering`, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import NamedTuple, final

from shardwright.ir.buckets import gather_messages
from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import contiguous_strides
from shardwright.program.instructions import Gather, Prefetch, Redistribute
from shardwright.simulate.memory.allocator import Block, Use
from shardwright.simulate.memory.tape import GatheredBucket, Tape
from shardwright.simulate.memory.values import View


@final
class PrefetchBucket:
    """The gather of a bucket, and the copies that the backward pass wants again."""

    def __init__(self, walk: Tape, one: Prefetch, before: GatheredBucket | None) -> None:
        self.walk, self.parts, self.before = walk, one.parts, before
        self.ranks = walk.sizes[one.axis]
        self.tiles = [walk.views[part.value] for part in one.parts]
        self.users: Counter[int] = Counter()
        self._sent: list[tuple[list[int], Block]] = []
        self._again: dict[int, View] = {}

    def start(self) -> None:
        """Send for all copies."""
        self._send(list(range(len(self.parts))))

    def arrive(self) -> dict[int, View]:
        """The copies that were sent for, in their order; they are the caller's."""
        heap = self.walk.heap
        sent, self._sent = self._sent, []
        copies = {}
        for numbers, buffer in sent:
            for number in numbers:
                part, dtype = self.parts[number], self._dtype(number)
                if len(numbers) == 1 and _as_sent(part, self.ranks):
                    block = heap.own(buffer)
                    heap.becomes(block, Use.WORKSPACE)
                    heap.assign(block, self.tiles[number].block.module, block.bytes)
                else:
                    size = prod(part.after) * ITEM_BYTES[dtype]
                    block = heap.new(size, like=self.tiles[number].block)
                copies[number] = View(block, part.after, contiguous_strides(part.after), dtype)
            heap.drop(buffer)
        return dict(sorted(copies.items()))

    def again(self, number: int) -> View:
        """A copy that an operator wants again, which owns it too."""
        if number not in self._again and self._sent:
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
        if wanted and not self._sent:
            self._send(sorted(wanted))

    def _send(self, numbers: Sequence[int]) -> None:
        """Tiles are put where they will be among those of all ranks."""
        parts = [(self.parts[n], self._dtype(n)) for n in numbers]
        for places in _messages(parts, self.walk, self.ranks):
            rooms = (_room(parts[i][0], self.ranks) * ITEM_BYTES[parts[i][1]] for i in places)
            buffer = self.walk.heap.new(sum(rooms) * self.ranks, Use.COMMUNICATION)
            self._sent.append(([numbers[i] for i in places], buffer))

    def _dtype(self, number: int) -> str:
        cast = self.parts[number].cast
        return cast[0] if cast else self.tiles[number].dtype


def prefetch(walk: Tape, one: Prefetch) -> None:
    """A bucket of copies sets out."""
    walk.heap.where = f"gather of {one.parts[0].value}, forward"
    before = walk.flights[one.before] if one.before else None
    flight = walk.flights[one.flight] = PrefetchBucket(walk, one, before)
    flight.start()


def gather(walk: Tape, one: Gather) -> None:
    """Its copies arrive; their gradients leave in buffers, and arrive as parts of others."""
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
        came = [
            _Gradient(part, gradient, copied)
            for part, copied in zip(one.parts, one.copied, strict=True)
            if (gradient := walk.taken(part.result)) is not None
        ]
        if came:
            for earlier in walk.works.pop(one.works, ()):
                heap.drop(earlier)
        for places in _messages([(g.part, g.dtype) for g in came], walk, ranks):
            _scattered(walk, one, [came[i] for i in places], ranks)
        for g in came:
            heap.drop(g.gradient.block)

    walk.node(f"gradients of {one.parts[0].value}", tuple(part.result for part in one.parts), back)


class _Gradient(NamedTuple):
    """Of a copy, and whether it may be another value's too."""

    part: Redistribute
    gradient: View
    copied: bool

    @property
    def dtype(self) -> str:
        """In which it is sent."""
        return self.part.cast[1] if self.part.cast else self.gradient.dtype


def _messages(parts: Sequence[tuple[Redistribute, str]], walk: Tape, ranks: int) -> list[list[int]]:
    copies = [(prod(one.after) * ITEM_BYTES[dtype], _as_sent(one, ranks)) for one, dtype in parts]
    return gather_messages(copies, walk.rank.backend.alone_bytes)


def _scattered(walk: Tape, one: Gather, came: Sequence[_Gradient], ranks: int) -> None:
    """Gradients in one buffer, of which this rank gets its part; one that may be is the buffer."""
    heap, (first, *more) = walk.heap, came
    dtype = first.dtype
    size = sum(_room(g.part, ranks) for g in came) * ITEM_BYTES[dtype]
    if not more and _as_sent(first.part, ranks):
        given = _alone(walk, first)
    else:
        given = heap.new(size * ranks, Use.COMMUNICATION)
    own = heap.new(size, Use.COMMUNICATION)
    if one.summed:
        heap.drop(given)
    else:
        walk.works[one.works].append(given)  # until the sum is waited for
    for g in came:
        strides = contiguous_strides(g.part.before)
        walk.give(g.part.value, View(heap.own(own), g.part.before, strides, dtype))
    heap.drop(own)


def _alone(walk: Tape, one: _Gradient) -> Block:
    """A buffer of one gradient: itself, if it is of that dtype, in order and nobody else's."""
    heap, gradient = walk.heap, one.gradient
    size = gradient.bytes // ITEM_BYTES[gradient.dtype] * ITEM_BYTES[one.dtype]
    if one.dtype == gradient.dtype and gradient.contiguous and not one.copied:
        return heap.own(gradient.block)
    turned = one.dtype != gradient.dtype and not gradient.contiguous
    cast = heap.new(size, like=gradient.block) if turned else None
    given = heap.new(size, Use.COMMUNICATION)
    if cast is not None:
        heap.drop(cast)
    return given


def _as_sent(part: Redistribute, ranks: int) -> bool:
    """Whether the ranks' tiles, one after the other, are the copy."""
    (there,) = part.forward
    return there.whole[there.src] % ranks == 0 and prod(there.whole[: there.src]) == 1


def _room(part: Redistribute, ranks: int) -> int:
    """Elements of the largest tile."""
    (there,) = part.forward
    long = there.whole[there.src]
    return -(-long // ranks) * (prod(there.whole) // long)
