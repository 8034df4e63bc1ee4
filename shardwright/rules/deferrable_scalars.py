"""Scalars whose all-reduce may be deferred to the end of the step.

`program/lower/scalar_reductions.py` starts these all-reduces early and waits for them late. It
finds the same scalars in a program that this module finds in a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwright.ir.graph import Graph, LeafKind, Op, Ref

SCALINGS = ("aten.div.Tensor", "aten.mul.Tensor")  # linear in their first operand


def deferrable_scalars(graph: Graph) -> frozenset[tuple[str, str]]:
    """Pairs (scalar value, reader) between which an all-reduce may be in flight.

    There are two kinds: scalars that depend only on the batch, if other operators run before their
    reader, and scalars that the step returns, possibly after multiplication by constants. The
    reader of a returned value is `""`.
    """
    return frozenset((*_batch_scalars(graph), *_returned_scalars(graph)))


def _batch_scalars(graph: Graph) -> Iterator[tuple[str, str]]:
    given = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    busy = False
    for op in graph.ops:
        early = given.issuperset(op.operands)
        if busy:
            numbers = dict.fromkeys(given.intersection(op.operands))
            yield from ((v, op.name) for v in numbers if graph.tensor[v].shape == ())
        if early:
            given.update(op.outputs)
        busy = busy or not early


def _returned_scalars(graph: Graph) -> Iterator[tuple[str, str]]:
    read = Counter(name for op in graph.ops for name in op.operands)
    read.update((*graph.outputs, *(value for _, value in graph.updates)))
    for name in graph.outputs:
        reader = ""
        while read[name] == 1 and graph.tensor[name].shape == ():
            yield name, reader
            op = graph.producer.get(name)
            if op is None or not _is_fixed_scaling(op, graph):
                break
            name, reader = op.operands[0], op.name


def _is_fixed_scaling(op: Op, graph: Graph) -> bool:
    """Whether `op` multiplies or divides its first operand by a value without a gradient.

    The gradient of a trained scale depends on the reduced sum.
    """
    if op.target not in SCALINGS or op.args[0] != Ref(op.operands[0]):
        return False
    return not any(graph.tensor[scale].requires_grad for scale in op.operands[1:])
