"""Memory of collectives: buffers in flight, and results.

It follows `runtime/comm/collectives.py`. Results may share the buffer in which they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import add
from typing import NamedTuple

from shardwright.ir.graph import ITEM_BYTES
from shardwright.ir.op_memory import contiguous_strides
from shardwright.ir.redistribution import MOVING, ByKind, Collective, Exchange
from shardwright.program.instructions import Move
from shardwright.program.step.instructions import Part
from shardwright.simulate.memory.allocator import Allocator, Block, Use
from shardwright.simulate.memory.values import View

Results = Callable[[], list[View]]  # what is returned when a transfer was waited for


class SentTensors(NamedTuple):
    """The tensors of a transfer among `ranks`: its parts, each as it is sent, with an owner.

    `own` says whether the first one's memory is nobody else's; `receives_terms` as of the backend.
    """

    parts: Sequence[Part]
    views: Sequence[View]
    ranks: int
    own: bool
    receives_terms: bool


def started(allocator: Allocator, kind: Collective, sent: SentTensors) -> Results:
    """Start a transfer; what is returned gives the results, each with an owner."""
    return TRANSFERS[kind](allocator, sent)


def all_reduce(allocator: Allocator, sent: SentTensors) -> Results:
    """A single owned tensor is reduced in place; other tensors are copied into a buffer."""
    views = sent.views
    if len(views) == 1 and sent.own and views[0].contiguous:
        buffer = views[0].block
    else:
        size = sum(view.bytes for view in views)
        like = views[0].block if len(views) == 1 else None
        buffer = allocator.new(size, Use.COMMUNICATION, module_of=like)
        for view in views:
            allocator.drop(view.block)
    return lambda: _sharing(allocator, buffer, sent.parts)


def all_gather(allocator: Allocator, sent: SentTensors) -> Results:
    """All ranks' tiles arrive in one buffer, from which the results are copied."""
    parts, ranks = sent.parts, sent.ranks
    sizes = [_longest(part.move, part.move.src, ranks) * ITEM_BYTES[part.dtype] for part in parts]
    alone = sent.views[0].block if len(parts) == 1 else None
    buffer = allocator.new(sum(sizes) * ranks, Use.COMMUNICATION, module_of=alone)
    owners = [view.block for view in sent.views]
    for owner in owners:
        allocator.drop(owner)

    def results() -> list[View]:
        if len(parts) == 1 and parts[0].leads:
            allocator.becomes(buffer, Use.WORKSPACE)
            return [_result(buffer, parts[0])]
        found = []
        for part, owner in zip(parts, owners, strict=True):
            size = prod(part.shape) * ITEM_BYTES[part.dtype]
            found.append(_result(allocator.new(size, module_of=owner), part))
        allocator.drop(buffer)
        return found

    return results


def reduce_scatter(allocator: Allocator, sent: SentTensors) -> Results:
    """Tiles are copied into a buffer rank by rank, unless a single tensor is in that order."""
    parts, ranks, first = sent.parts, sent.ranks, sent.views[0]
    sizes = [_longest(part.move, part.move.dst, ranks) * ITEM_BYTES[part.dtype] for part in parts]
    ordered = parts[0].in_order(ranks) and first.contiguous
    if len(parts) == 1 and ordered:
        buffer = first.block
    else:
        buffer = allocator.new(sum(sizes) * ranks, Use.COMMUNICATION)
        for view in sent.views:
            allocator.drop(view.block)
    own_tiles = allocator.new(sum(sizes), Use.COMMUNICATION)
    others = ranks - 2 if sent.receives_terms else 0  # one term arrives where the sum will be
    terms = [allocator.new(sum(sizes), Use.COMMUNICATION) for _ in range(others)]

    def results() -> list[View]:
        for block in (buffer, *terms):
            allocator.drop(block)
        return _sharing(allocator, own_tiles, parts)

    return results


def all_to_all(allocator: Allocator, sent: SentTensors) -> Results:
    """Tiles are sent from one buffer and arrive in another, and are joined in a third."""
    (part,), (view,) = sent.parts, sent.views
    message = allocator.new(view.bytes, Use.COMMUNICATION, module_of=view.block)
    found = allocator.new(prod(part.shape) * ITEM_BYTES[part.dtype], module_of=view.block)
    allocator.drop(view.block)

    def results() -> list[View]:
        allocator.drop(message)
        if prod(part.move.whole[: part.move.src]) == 1:
            return [_result(found, part)]
        joined = allocator.new(found.bytes, module_of=found)
        allocator.drop(found)
        return [_result(joined, part)]

    return results


def swap(allocator: Allocator, sent: SentTensors) -> Results:
    """Halves are sent from one buffer and arrive in another, and are put in order in a third."""
    (part,), (view,) = sent.parts, sent.views
    message = allocator.new(view.bytes, Use.COMMUNICATION, module_of=view.block)
    size = prod(part.shape) * ITEM_BYTES[part.dtype]
    arriving = allocator.new(size, Use.COMMUNICATION, module_of=view.block)
    allocator.drop(view.block)

    def results() -> list[View]:
        allocator.drop(message)
        found = allocator.new(size, module_of=arriving)
        allocator.drop(arriving)
        return [_result(found, part)]

    return results


TRANSFERS = ByKind[Callable[[Allocator, SentTensors], Results]](
    "whose memory is known",
    {
        Collective.ALL_REDUCE: all_reduce,
        Collective.ALL_GATHER: all_gather,
        Collective.REDUCE_SCATTER: reduce_scatter,
        Collective.ALL_TO_ALL: all_to_all,
        Collective.SWAP: swap,
        Collective.SWAP_BACK: swap,
    },
    MOVING,
)


# Bytes in flight from what a rank sends and receives, beside operands and results.
_IN_FLIGHT = ByKind[Callable[[int, int], int]](
    "inside of one operator whose memory is known",
    {
        Exchange.RING: add,  # the block that is computed with is sent, the next one arrives
        Exchange.ROWS: add,
    },
    (Exchange.RING, Exchange.ROWS),
)


def exchange_bytes(kind: Exchange, sent: int, received: int) -> int:
    """Bytes in flight of an exchange inside of an operator, beside its operands and results."""
    return _IN_FLIGHT[kind](sent, received)


def _sharing(allocator: Allocator, buffer: Block, parts: Sequence[Part]) -> list[View]:
    """Results that share a buffer."""
    found = [_result(allocator.own(buffer), part) for part in parts]
    allocator.drop(buffer)
    return found


def _result(block: Block, part: Part) -> View:
    return View(block, part.shape, contiguous_strides(part.shape), part.dtype, grad=True)


def _longest(move: Move, dim: int, ranks: int) -> int:
    """Elements of the largest tile along a dimension."""
    return prod(move.whole) // max(1, move.whole[dim]) * -(-move.whole[dim] // ranks)
