"""Replaces tensors that are filled slice by slice by one concatenation.

Models allocate a tensor and assign to its slices along one dimension, such as the parts of each
head with positions and without. Made functional, each assignment writes all of the tensor again,
and the first one reads what was allocated. If the slices cover every element once, `cat` computes
the same, and nothing is allocated before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.ir.graph import Graph, Op, Ref, whole_number

_ARGUMENTS = ("self", "src", "dim", "start", "end", "step")


def with_joined_slices(graph: Graph) -> Graph:
    """`graph` with one `cat` for each tensor that slices fill; what it replaces is dead code."""
    return replace(graph, ops=tuple(_joined(op, graph) or op for op in graph.ops))


def _joined(last: Op, graph: Graph) -> Op | None:
    """The concatenation that computes the result of an operator; None if there is none."""
    assignments = list(_assignments(last, graph))
    if not assignments:
        return None
    allocated = graph.tensor[assignments[-1].operands[0]]
    dims = {_dim(op, len(allocated.shape)) for op in assignments}
    if len(dims) > 1 or allocated.requires_grad:  # its gradient is zero, not missing
        return None
    dim = dims.pop()
    found = sorted((*_range(op, allocated.shape[dim]), op.operands[1]) for op in assignments)
    ends = [stop for _, stop, _ in found]
    if [start for start, _, _ in found] != [0, *ends[:-1]] or ends[-1] != allocated.shape[dim]:
        return None
    parts = tuple(Ref(name) for _, _, name in found)
    if any(graph.tensor[part.name].dtype != allocated.dtype for part in parts):
        return None
    return replace(last, target="aten.cat.default", args=(parts, dim), kwargs=())


def _assignments(last: Op, graph: Graph) -> Iterator[Op]:
    """The assignments to slices of neighbouring elements that made the result of `last`."""
    op: Op | None = last
    while op is not None and op.kind == "slice_scatter" and _argument(op, "step", 1) == 1:
        yield op
        op = graph.producer.get(op.operands[0])


def _argument(op: Op, name: str, otherwise: int | None) -> int | None:
    place = _ARGUMENTS.index(name)
    given = op.args[place] if place < len(op.args) else dict(op.kwargs).get(name)
    return otherwise if given is None else whole_number(given)


def _dim(op: Op, rank: int) -> int:
    return (_argument(op, "dim", 0) or 0) % rank


def _range(op: Op, size: int) -> tuple[int, int]:
    """The first index of the slice, and the one after its last."""
    found = slice(_argument(op, "start", None), _argument(op, "end", None)).indices(size)
    return found[0], found[1]
