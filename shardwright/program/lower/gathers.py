"""Bucketed all-gathers of sharded parameters, prefetched one bucket ahead.

A gather of each parameter alone pays a collective's latency for each, and
what needs the copy waits for it. Here parameters that are read one after the other
share a buffer, and their bucket sets out when the bucket before it is first
read. Backward it is the other way round: the gradients of a bucket are
reduced while those of the bucket before are computed, and copies that were not
kept are gathered again, together and one bucket ahead.

After FSDP (arXiv 2304.11277), whose buckets are modules; these are of equal size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.ir.buckets import gather_buckets
from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    Fetch,
    Gather,
    Instruction,
    Prefetch,
    Program,
    Redistribute,
    reads,
)
from shardwright.program.lower.buckets import hand_on_gradients


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the parameters of a bucket have in common."""

    works: str  # of the `Fetch` that all tiles come from
    axis: str
    summed: tuple[str, ...]
    dtype: str
    cast: tuple[str, str] | None
    trained: bool


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Gathers of copies, the first of which is read by instruction `at`."""

    kind: _Kind
    at: int
    parts: tuple[Redistribute, ...]


def gathered(program: Program, graph: Graph) -> Program:
    """`program`, after `bucketed`, with a `Prefetch` and a `Gather` for each bucket of copies.

    Copies made inside of what is recomputed stay alone.
    """
    buckets = _fill(program, graph)
    if not buckets:
        return program
    fetches = {one.works: one for one in program.instructions if isinstance(one, Fetch)}
    gone = {part.result for bucket in buckets for part in bucket.parts}
    sent: dict[int, list[int]] = {}  # instruction -> buckets that set out before it
    for number in range(len(buckets)):
        sent.setdefault(buckets[max(0, number - 1)].at, []).append(number)
    ready = {bucket.at: number for number, bucket in enumerate(buckets)}
    copied = hand_on_gradients(program)
    found: list[Instruction] = []
    fetched: set[str] = set()
    for at, instruction in enumerate(program.instructions):
        for number in sent.get(at, ()):
            bucket = buckets[number]
            if bucket.kind.works not in fetched:
                found.append(fetches[bucket.kind.works])
                fetched.add(bucket.kind.works)
            before = f"flight/{number - 1}" if number else ""
            found.append(Prefetch(bucket.parts, f"flight/{number}", before, bucket.kind.axis))
        if at in ready:
            found.append(_arrival(buckets[ready[at]], ready[at], copied))
        if isinstance(instruction, Redistribute) and instruction.result in gone:
            continue
        if isinstance(instruction, Fetch):
            if instruction.works in fetched:
                continue
            fetched.add(instruction.works)
        found.append(instruction)
    return replace(program, instructions=tuple(found))


def _arrival(bucket: _Bucket, number: int, copied: Collection[str]) -> Gather:
    kind = bucket.kind
    flight, others = f"flight/{number}", tuple(part.result in copied for part in bucket.parts)
    return Gather(bucket.parts, flight, kind.works, kind.axis, kind.summed, others)


def _fill(program: Program, graph: Graph) -> list[_Bucket]:
    """The buckets in the order of their first readers."""
    leaves, works = {}, {}
    for one in program.instructions:
        if isinstance(one, Fetch):
            for load in one.parts:
                leaves[load.result], works[load.result] = load.leaf, one.works
    readers = Counter(name for one in program.instructions for name in reads(one))
    readers.update((*program.outputs, *(value for _, value in program.updates)))
    trained: list[_Bucket] = []
    frozen: list[_Bucket] = []  # that lie between trained ones, as adapters have them
    for at, one in enumerate(program.instructions):
        # A gradient on its way cannot be added to another one of the same parameter.
        if not isinstance(one, Redistribute) or readers[one.value] != 1 or one.value not in leaves:
            continue
        if (axes := _scattered(one)) is None:
            continue
        dtype = graph.tensor[leaves[one.value]].dtype
        kind = _Kind(works[one.value], axes[0], axes[1:], dtype, one.cast, one.differentiable)
        (trained if one.differentiable else frozen).append(_Bucket(kind, at, (one,)))
    found = [*_together(trained), *_together(frozen)]
    return sorted(found, key=lambda bucket: bucket.at)


def _together(alone: Sequence[_Bucket]) -> Iterator[_Bucket]:
    """Full buckets, of those with one copy each."""
    sizes = []
    for bucket in alone:
        (one,), kind = bucket.parts, bucket.kind
        sizes.append((prod(one.after) * ITEM_BYTES[one.cast[0] if one.cast else kind.dtype], kind))
    for numbers in gather_buckets(sizes):
        parts = tuple(part for n in numbers for part in alone[n].parts)
        yield replace(alone[numbers[0]], parts=parts)


def _scattered(one: Redistribute) -> tuple[str, ...] | None:
    """The axis of a gather whose gradient is scattered again, then those it is summed over.

    Nothing comes back for a frozen parameter.
    """
    if len(one.forward) != 1 or one.forward[0].collective is not Collective.ALL_GATHER:
        return None
    (there,) = one.forward
    if not one.differentiable:
        return (there.axis,)
    back = [move for move in one.backward if move.collective is Collective.REDUCE_SCATTER]
    rest = [move for move in one.backward if move.collective is not Collective.REDUCE_SCATTER]
    if len(back) != 1 or any(move.collective is not Collective.ALL_REDUCE for move in rest):
        return None
    if (back[0].axis, back[0].dst, back[0].whole) != (there.axis, there.src, there.whole):
        return None
    return (there.axis, *(move.axis for move in rest))
