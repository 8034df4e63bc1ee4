"""Buckets parameter gathers and gradient sums.

What each parameter costs beside its arithmetic is paid once per bucket: a node
of the autograd graph, the latency of a collective. Buckets are Li et al.'s
(PyTorch Distributed, VLDB 2020). The backward pass completes them from the
last parameter that the program reads to the first, and sums them while it goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.ir.buckets import BUCKET_BYTES, gradient_buckets
from shardwright.ir.graph import Graph, Ref
from shardwright.ir.mixed_precision import stored_item_bytes
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    Compute,
    Fetch,
    Instruction,
    Load,
    Program,
    Redistribute,
    Reduce,
    reads,
)

# Operators that compute the gradients of their operands. Others, as an
# addition, may hand on the gradient of their result, to several operands even.
_OWN_GRADIENTS = (
    "linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "conv3d", "embedding",
    "layer_norm", "native_layer_norm", "group_norm", "normalize", "standardize", "mul",
)  # fmt: skip
_ADDED = {"linear": 2, "addmm": 0}  # but an operand of the result's shape is just added


@dataclass
class _Bucket:
    """Parameters that are first read from instruction `at` on."""

    at: int
    axes: tuple[str, ...] = ()  # over which their gradients are summed
    loads: list[Load] = field(default_factory=list)
    sums: list[Redistribute] = field(default_factory=list)
    bytes: int = 0

    def add(self, other: _Bucket) -> None:
        self.loads += other.loads
        self.sums += other.sums
        self.bytes += other.bytes


def bucketed(program: Program, graph: Graph, limit: int | None = None) -> Program:
    """`program` with a `Fetch` or a `Fetch` and a `Reduce` for each bucket of parameters.

    A bucket is full when it holds `limit` bytes of this rank's tiles, by default those of
    `gradient_buckets` where gradients are summed and 25 MiB elsewhere. It is fetched where it is
    first read. Those whose gradients are summed are all fetched where the first of them is, so that
    the backward pass waits for no sum before it has started the last one.
    Parameters that nothing reads are not loaded.
    """
    readers = Counter(name for one in program.instructions for name in reads(one))
    readers.update((*program.outputs, *(value for _, value in program.updates)))
    buckets = _fill(program, graph, readers, limit)
    first = min((bucket.at for bucket in buckets if bucket.axes), default=0)
    copied = hand_on_gradients(program)
    fetches: dict[int, list[Instruction]] = {}
    sums: dict[int, list[Instruction]] = {}
    gone = set(_loads(program))
    for number, bucket in enumerate(buckets):
        works = f"works/{number}"
        copies = tuple(load.result in copied for load in bucket.loads)
        fetch = Fetch(tuple(bucket.loads), works, copies)
        fetches.setdefault(first if bucket.axes else bucket.at, []).append(fetch)
        if bucket.axes:
            copies = tuple(one.result in copied for one in bucket.sums)
            reduce = Reduce(tuple(bucket.sums), works, bucket.axes, copies)
            sums.setdefault(bucket.at, []).append(reduce)
            gone.update(one.result for one in bucket.sums)
    found: list[Instruction] = []
    for at, instruction in enumerate((*program.instructions, None)):
        # The backward pass goes the other way: it starts a sum before it waits for any.
        found += [*fetches.get(at, []), *sums.get(at, [])]
        loaded = isinstance(instruction, Load | Redistribute) and instruction.result in gone
        if instruction is not None and not loaded:
            found.append(instruction)
    return replace(program, instructions=tuple(found))


def _fill(
    program: Program, graph: Graph, readers: Counter[str], limit: int | None
) -> list[_Bucket]:
    """The buckets, in the order of their first readers."""
    alone: dict[tuple[str, ...], list[_Bucket]] = {}  # by what happens to the gradients
    for one in _in_order(program, graph, readers):
        alone.setdefault(one.axes, []).append(one)
    buckets: list[_Bucket] = []
    for axes, found in alone.items():
        if not axes:
            buckets += _filled(found, BUCKET_BYTES if limit is None else limit)
            continue
        for places in gradient_buckets([one.bytes for one in found], limit):
            bucket = found[places[0]]
            for place in places[1:]:
                bucket.add(found[place])
            buckets.append(bucket)
    return sorted(buckets, key=lambda bucket: bucket.at)


def _filled(alone: Sequence[_Bucket], limit: int) -> Iterator[_Bucket]:
    """Buckets filled in the given order, each of at least `limit` bytes but the last."""
    bucket: _Bucket | None = None
    for one in alone:
        if bucket is None:
            bucket = one
        else:
            bucket.add(one)
        if bucket.bytes >= limit:
            yield bucket
            bucket = None
    if bucket is not None:
        yield bucket


def _in_order(program: Program, graph: Graph, readers: Counter[str]) -> Iterator[_Bucket]:
    """A bucket for each parameter that is read, in the order of their first readers."""
    loads = _loads(program)
    returned = (*program.outputs, *(value for _, value in program.updates))
    last = len(program.instructions)
    given = [(at, one, reads(one)) for at, one in enumerate(program.instructions)]
    for at, instruction, names in (*given, (last, None, returned)):
        for name in names:
            if (load := loads.pop(name, None)) is None:
                continue
            bucket = _Bucket(at, loads=[load])
            bucket.bytes = prod(load.shape) * stored_item_bytes(graph, load.leaf)
            # A sum on its way cannot be added to another gradient of the same parameter.
            if isinstance(instruction, Redistribute) and readers[name] == 1:
                bucket.axes = _summed_over(instruction)
                bucket.sums += [instruction] if bucket.axes else []
            yield bucket


def _loads(program: Program) -> dict[str, Load]:
    return {one.result: one for one in program.instructions if isinstance(one, Load)}


def _summed_over(instruction: Redistribute) -> tuple[str, ...]:
    """The axes of a redistribution that is nothing but a sum of gradients, else none."""
    if instruction.forward:
        return ()
    if any(move.collective is not Collective.ALL_REDUCE for move in instruction.backward):
        return ()
    return tuple(move.axis for move in instruction.backward)


def hand_on_gradients(program: Program) -> set[str]:
    """Values one of whose readers may give them a gradient that it gives others too."""
    found = {*program.outputs, *(value for _, value in program.updates)}
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            op = instruction.op
            if op.kind.removesuffix("_") not in _OWN_GRADIENTS:
                found.update(op.operands)
            elif op.kind in _ADDED and len(op.args) > _ADDED[op.kind]:
                added = op.args[_ADDED[op.kind]]
                found.update([added.name] if isinstance(added, Ref) else [])
        elif isinstance(instruction, Redistribute):
            moves = instruction.backward
            if not moves or not moves[-1].collective.moves_data:
                found.add(instruction.value)
        else:
            found.update(reads(instruction))
    return found
