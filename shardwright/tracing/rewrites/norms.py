"""Replaces RMS norms of single operators by torch's `rms_norm`, one kernel on accelerators.

Models of Hugging Face compute x · rsqrt(mean(x²) + eps) in float32, cast it to the model's dtype
and multiply by a weight, which is eight kernels and three saved copies of x. The kernel saves x
and a number for each row. In half precision it multiplies before it rounds, so that a result is
rounded once and not twice; in float32 and float64 both compute the same.

The kernel needs whole rows. A norm of features that tensor parallelism splits, those of all heads
or of a gated branch, stays as it is: there devices add up their parts of the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from shardwright.ir.graph import Graph, Op, Ref
from shardwright.ir.options.mixed_precision import HALF_DTYPES

_VIEWS = ("view", "_unsafe_view", "reshape")
_ROW_BYTES = {"float64": 8}  # of what is saved for a row; else 4


def with_fused_norms(graph: Graph) -> Graph:
    """`graph` with one operator for each RMS norm; what it replaces is dead code."""
    found = {op.name: op for op in _norms(graph)}
    return replace(graph, ops=tuple(found.get(op.name, op) for op in graph.ops))


def _norms(graph: Graph) -> Iterator[Op]:
    for op in graph.ops:
        if op.kind != "rsqrt":
            continue
        norm = _normed(graph, op)
        if norm is None:
            continue
        norm = _weighted(graph, _rounded(graph, norm))
        if not _of_split_features(graph, norm):
            yield _fused(graph, norm)


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm of `x` that `last` computes, with a weight or without."""

    x: str
    eps: float
    last: Op
    weight: str | None = None


def _normed(graph: Graph, root: Op) -> _Norm | None:
    """The norm over the last dimension that an `rsqrt` belongs to, if it is one."""
    added = _only(graph, root.operands[0], "add")
    scaled = added and _only(graph, added.operands[0], "mul", "div")
    summed = scaled and _only(graph, scaled.operands[0], "sum")
    square = summed and _only(graph, summed.operands[0], "pow", "mul")
    if not (added and scaled and summed and square):
        return None
    eps, factor = _number(added), _number(scaled)
    x = square.operands[0]
    shape = graph.tensor[x].shape
    count = 1 / factor if factor and scaled.kind == "mul" else factor
    exact = (
        (square.args[1:] == (2,) if square.kind == "pow" else square.operands == (x, x))
        and summed.args[1:] in (((-1,), True), ((len(shape) - 1,), True))
        and not (square.kwargs or summed.kwargs or added.kwargs or scaled.kwargs)
        and eps is not None
        and count == shape[-1]
    )
    last = _only_reader(graph, root.outputs[0], "mul")
    if not exact or last is None:
        return None
    if {*last.operands} not in [{given, root.outputs[0]} for given in (x, _wide_copy_of(graph, x))]:
        return None
    assert eps is not None
    return _Norm(x, eps, last)


def _wide_copy_of(graph: Graph, name: str) -> str:
    """The value in half precision that this one is a float32 copy of (T5 scales that); else it."""
    cast = graph.producer.get(name)
    if cast is None or cast.kind != "_to_copy" or graph.tensor[name].dtype != "float32":
        return name
    source = cast.operands[0]
    return source if graph.tensor[source].dtype in HALF_DTYPES else name


def _rounded(graph: Graph, norm: _Norm) -> _Norm:
    """With the cast to float32 before it and back after it, if only the norm reads the former."""
    cast = graph.producer.get(norm.x)
    back = _only_reader(graph, norm.last.outputs[0], "_to_copy")
    if cast is None or cast.kind != "_to_copy" or back is None:
        return norm
    given = graph.tensor[cast.operands[0]].dtype
    made = graph.tensor[back.outputs[0]].dtype
    same = given == made and given in HALF_DTYPES and graph.tensor[norm.x].dtype == "float32"
    return replace(norm, x=cast.operands[0], last=back) if same else norm


def _weighted(graph: Graph, norm: _Norm) -> _Norm:
    """With the weight of the same dtype that its result is multiplied by, if there is one."""
    name = norm.last.outputs[0]
    times = _only_reader(graph, name, "mul")
    if times is None or len({*times.operands}) != 2:
        return norm
    (weight,) = {*times.operands} - {name}
    tensor, width = graph.tensor[weight], graph.tensor[name].shape[-1]
    if tensor.shape != (width,) or tensor.dtype != graph.tensor[name].dtype:
        return norm
    return replace(norm, last=times, weight=weight)


def _of_split_features(graph: Graph, norm: _Norm) -> bool:
    """Whether x has the features of all heads, or is a product of two activations."""
    width = graph.tensor[norm.x].shape[-1]
    made = graph.producer.get(norm.x)
    while made is not None and made.kind == "_to_copy":
        made = graph.producer.get(made.operands[0])
    if made is None:
        return False
    if made.kind in _VIEWS:
        return graph.tensor[made.operands[0]].shape[-1] < width
    if made.kind == "mul":
        shapes = [graph.tensor[name].shape for name in made.operands]
        return len(shapes) == 2 and shapes[0] == shapes[1]
    readers = graph.consumers[norm.last.outputs[0]]
    return made.kind == "linear" and any(
        op.kind in _VIEWS and graph.tensor[op.outputs[0]].shape[-1] < width for op in readers
    )


def _fused(graph: Graph, norm: _Norm) -> Op:
    """The kernel that computes a norm, in place of its last operator."""
    shape, dtype = graph.tensor[norm.x].shape, graph.tensor[norm.x].dtype
    operands = (norm.x,) if norm.weight is None else (norm.x, norm.weight)
    trained = any(graph.tensor[name].requires_grad for name in operands)
    return Op(
        norm.last.name,
        "aten.rms_norm.default",
        (
            Ref(norm.x),
            (shape[-1],),
            *(() if norm.weight is None else (Ref(norm.weight),)),
        ),
        (("eps", norm.eps),),
        norm.last.outputs,
        norm.last.source,
        saves=operands if trained else (),
        extra_saved=prod(shape[:-1]) * _ROW_BYTES.get(dtype, 4) if trained else 0,
    )


def _only(graph: Graph, name: str, *kinds: str) -> Op | None:
    """The producer of a value, if it is of one of the kinds and the value has one reader."""
    op = graph.producer.get(name)
    return op if op is not None and op.kind in kinds and _read_once(graph, name) else None


def _only_reader(graph: Graph, name: str, kind: str) -> Op | None:
    """The only reader of a value, if it is of a kind."""
    readers = graph.consumers[name]
    return readers[0] if _read_once(graph, name) and readers[0].kind == kind else None


def _read_once(graph: Graph, name: str) -> bool:
    return len(graph.consumers[name]) == 1 and name not in graph.outputs


def _number(op: Op) -> float | None:
    """The second argument, if it is a number."""
    given = op.args[1] if len(op.args) == 2 else None
    return float(given) if isinstance(given, int | float) else None
