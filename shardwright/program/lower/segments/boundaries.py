"""Finds the values that a recomputed segment keeps for its second run, and no other one reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from shardwright.ir.graph import ITEM_BYTES, Graph
from shardwright.program.instructions import (
    Compute,
    Dropout,
    DroppedMlp,
    Instruction,
    Joint,
    Load,
    Program,
    RecomputedSegment,
    Redistribute,
    RunModule,
    Shape,
    Uniform,
    writes,
)
from shardwright.program.lower.mixed_precision import cast_dtype

# Bytes of the smallest value that is offloaded, as torchtune's `OffloadActivations` has it.
LEAST_BYTES = 1024


class Boundary(NamedTuple):
    """A value that only the recomputed segment with this number reads again."""

    name: str
    segment: int
    shape: Shape
    dtype: str


def boundaries(program: Program, graph: Graph) -> list[Boundary]:
    """The boundaries of a program's segments, in its order.

    Left out are parameters and inputs, copies of parameters, returned values, small ones, and those
    that several segments read, such as masks.
    """
    weights, alias = set(program.leaves), dict[str, str]()
    readers: defaultdict[str, dict[int, None]] = defaultdict(dict)
    types: dict[str, tuple[Shape, str]] = {}
    for one in _flat(program):
        if isinstance(one, RecomputedSegment):
            for name in one.takes:
                readers[alias.get(name, name)][one.number] = None
            continue
        if isinstance(one, Redistribute) and not one.forward:
            alias[one.result] = alias.get(one.value, one.value)
        if isinstance(one, Load) or (isinstance(one, Redistribute) and one.value in weights):
            weights.add(one.result)
        types.update(_types(one, types, graph))
    kept = weights.union(program.outputs, (value for _, value in program.updates))
    found = []
    for name, segments in readers.items():
        if name in kept or len(segments) > 1:
            continue
        (segment,), (shape, dtype) = segments, types[name]
        if prod(shape) * ITEM_BYTES[dtype] >= LEAST_BYTES:
            found.append(Boundary(name, segment, shape, dtype))
    return found


def _flat(program: Program) -> Iterator[Instruction]:
    """All instructions, a segment before those inside of it."""
    for one in program.instructions:
        yield one
        if isinstance(one, RecomputedSegment):
            yield from one.instructions


def _types(
    one: Instruction, known: dict[str, tuple[Shape, str]], graph: Graph
) -> Iterator[tuple[str, tuple[Shape, str]]]:
    """The shapes on this rank, and the dtypes, of the results of an instruction."""
    match one:
        case Load():
            yield one.result, (one.shape, graph.tensor[one.leaf].dtype)
            return
        case Redistribute():
            source = known.get(one.value)
            dtype = one.cast[0] if one.cast else source[1] if source else ""
            yield one.result, (one.after, dtype or graph.tensor[one.value].dtype)
            return
        case Compute() | DroppedMlp() | Joint():
            shapes = one.shapes
        case Dropout() | Uniform():
            shapes = (tuple(prod(length for _, length, _ in dim) for dim in one.positions),)
        case RunModule():
            shapes = tuple(graph.tensor[name].shape for name in one.op.outputs)
        case RecomputedSegment():
            return
        case _:  # attention: the rows of the query, the width of the value
            query, value = (known[one.op.operands[i]][0] for i in (0, 2))
            shapes = ((*query[:-1], value[-1]),)
    for name, shape in zip(writes(one), shapes, strict=True):
        tensor = graph.tensor.get(name)  # casts of parameters are not in the graph
        yield name, (shape, tensor.dtype if tensor else cast_dtype(one))
