"""Scalars whose all-reduce may be deferred to the end of the step.

`program/lower/scalar_reductions.py` puts these sums where they are under way while operators run;
what is found here, of a graph, is what it finds of a program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from shardwright.ir.graph import Graph, LeafKind, Op, Ref

SCALINGS = ("aten.div.Tensor", "aten.mul.Tensor")  # linear in what they begin with


def unawaited(graph: Graph) -> frozenset[tuple[str, str]]:
    """The values without dimensions, with who reads them, that need not be there at once.

    Those that depend on the batch alone, where other work comes before their reader; and those that
    the step returns, with what is only scaled on its way there. `""` reads what is returned.
    """
    return frozenset((*_of_the_batch(graph), *_returned(graph)))


def _of_the_batch(graph: Graph) -> Iterator[tuple[str, str]]:
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


def _returned(graph: Graph) -> Iterator[tuple[str, str]]:
    read = Counter(name for op in graph.ops for name in op.operands)
    read.update((*graph.outputs, *(value for _, value in graph.updates)))
    for name in graph.outputs:
        reader = ""
        while read[name] == 1 and graph.tensor[name].shape == ():
            yield name, reader
            op = graph.producer.get(name)
            if op is None or not _scales(op, graph):
                break
            name, reader = op.operands[0], op.name


def _scales(op: Op, graph: Graph) -> bool:
    """Whether `op` scales what it reads first by what is not trained.

    The gradient of a trained scale depends on the whole sum.
    """
    if op.target not in SCALINGS or op.args[0] != Ref(op.operands[0]):
        return False
    return not any(graph.tensor[scale].requires_grad for scale in op.operands[1:])
