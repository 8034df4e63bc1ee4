"""Parameters loaded, and their gradients summed, several at a time.

What each parameter costs beside its arithmetic is paid once per bucket: a node
of the autograd graph, the latency of a collective. Buckets are Li et al.'s
(PyTorch Distributed, VLDB 2020), filled in the order in which the program
first reads the parameters; the backward pass completes them from the last to
the first, and sums one bucket while it computes the gradients of the next.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from shardwright.ir.graph import Graph, Ref
from shardwright.ir.masters import stored_item_bytes
from shardwright.ir.redistribution import BUCKET_BYTES, Collective
from shardwright.lower.program import (
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
    "layer_norm", "native_layer_norm", "group_norm", "normalize", "mul",
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


def bucketed(program: Program, graph: Graph, limit: int = BUCKET_BYTES) -> Program:
    """`program` with a `Fetch` or a `Fetch` and a `Reduce` for each bucket of parameters.

    A bucket is full when it holds `limit` bytes of this rank's tiles. It is
    fetched where it is first read; where its gradients are summed, one bucket
    earlier, so that the backward pass waits for the sums one bucket later.
    Parameters that nothing reads are not loaded.
    """
    readers = Counter(name for one in program.instructions for name in reads(one))
    readers.update((*program.outputs, *(value for _, value in program.updates)))
    buckets = _fill(program, graph, readers, limit)
    summed = [bucket for bucket in buckets if bucket.axes]
    earlier = {id(b): a.at for a, b in pairwise(summed)}
    copied = _hand_on_gradients(program)
    fetches: dict[int, list[Instruction]] = {}
    sums: dict[int, list[Instruction]] = {}
    gone = set(_loads(program))
    for number, bucket in enumerate(buckets):
        works = f"works/{number}"
        copies = tuple(load.result in copied for load in bucket.loads)
        fetch = Fetch(tuple(bucket.loads), works, copies)
        fetches.setdefault(earlier.get(id(bucket), bucket.at), []).append(fetch)
        if bucket.axes:
            sums.setdefault(bucket.at, []).append(Reduce(tuple(bucket.sums), works, bucket.axes))
            gone.update(one.result for one in bucket.sums)
    found: list[Instruction] = []
    for at, instruction in enumerate((*program.instructions, None)):
        # The backward pass goes the other way: it starts a sum before it waits for the last one.
        found += [*fetches.get(at, []), *sums.get(at, [])]
        loaded = isinstance(instruction, Load | Redistribute) and instruction.result in gone
        if instruction is not None and not loaded:
            found.append(instruction)
    return replace(program, instructions=tuple(found))


def _fill(program: Program, graph: Graph, readers: Counter[str], limit: int) -> list[_Bucket]:
    """The buckets, in the order of their first readers."""
    loads = _loads(program)
    buckets: list[_Bucket] = []
    open_: dict[tuple[str, ...], _Bucket] = {}  # by what happens to the gradients

    def put(load: Load, at: int, axes: tuple[str, ...]) -> _Bucket:
        if axes not in open_:
            open_[axes] = _Bucket(at, axes)
            buckets.append(open_[axes])
        bucket = open_[axes]
        bucket.loads.append(load)
        bucket.bytes += prod(load.shape) * stored_item_bytes(graph, load.leaf)
        if bucket.bytes >= limit:
            del open_[axes]
        return bucket

    returned = (*program.outputs, *(value for _, value in program.updates))
    for at, instruction in enumerate(program.instructions):
        for name in reads(instruction):
            if (load := loads.pop(name, None)) is None:
                continue
            # A sum on its way cannot be added to another gradient of the same parameter.
            axes = _summed_over(instruction) if readers[name] == 1 else ()
            bucket = put(load, at, axes)
            if axes:
                assert isinstance(instruction, Redistribute)
                bucket.sums.append(instruction)
    for name in returned:
        if (load := loads.pop(name, None)) is not None:
            put(load, len(program.instructions), ())
    return buckets


def _loads(program: Program) -> dict[str, Load]:
    return {one.result: one for one in program.instructions if isinstance(one, Load)}


def _summed_over(instruction: Instruction) -> tuple[str, ...]:
    """The axes of a redistribution that is nothing but a sum of gradients, else none."""
    if not isinstance(instruction, Redistribute) or instruction.forward:
        return ()
    if any(move.collective is not Collective.ALL_REDUCE for move in instruction.backward):
        return ()
    return tuple(move.axis for move in instruction.backward)


def _hand_on_gradients(program: Program) -> set[str]:
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
