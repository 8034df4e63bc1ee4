"""Leaves out casts of half-precision logits to float32 that a cross entropy alone reads.

Models of Hugging Face write `logits.float()`, views and slices, and a cross entropy. In half
precision that makes a float32 copy of the logits, and another of their gradient. The operator that
takes its place reads the half-precision logits and computes in float32
(`tracing/own_operators/cross_entropy.py`). A cast that something else reads, or that is changed
before the loss, stays, as do losses with class weights, label smoothing or probabilities.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.ir.graph import Graph, Op, Ref, argument
from shardwright.ir.options.mixed_precision import HALF_DTYPES
from shardwright.rules.operators.half_logits import CROSS_ENTROPY

_REDUCTIONS = (0, 2)  # ATen's Reduction enum: none and sum; means are sums by now
_MOVES = (  # operators that move elements and change none
    *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("slice", "select", "transpose", "permute", "clone", "contiguous", "alias"),
)


def with_loss_casts(graph: Graph) -> Graph:
    """`graph` whose losses read half-precision logits where they can; their casts are dead code."""
    ops, values = dict(graph.op), dict(graph.tensor)
    for loss in graph.ops:
        if loss.target != "aten.cross_entropy_loss.default" or not _is_plain(graph, loss):
            continue
        if not (path := _path(graph, loss)):
            continue
        cast, *moves = path
        (before,), (copy,) = cast.operands, cast.outputs
        dtype = graph.tensor[before].dtype
        for op in moves:
            made = values[op.outputs[0]]
            alias = before if made.alias_of == copy else made.alias_of
            values[made.name] = replace(made, dtype=dtype, alias_of=alias)
        reader = moves[0] if moves else loss
        names = [before if name == copy else name for name in reader.operands]
        ops[reader.name] = reader.with_operands(names)
        last = ops[loss.name]
        saves = last.operands if graph.tensor[loss.outputs[0]].requires_grad else ()
        ops[loss.name] = replace(last, target=CROSS_ENTROPY, saves=saves, extra_saved=0)
    return replace(graph, ops=tuple(ops.values()), values=tuple(values.values()))


def _is_plain(graph: Graph, loss: Op) -> bool:
    """Whether a cross entropy takes (samples, classes) and the class of each sample, no more."""
    logits = loss.args[0]
    return (
        isinstance(logits, Ref)
        and len(graph.tensor[logits.name].shape) == 2
        and "int" in graph.tensor[loss.operands[1]].dtype
        and argument(loss, 2, "weight") is None
        and argument(loss, 3, "reduction", 1) in _REDUCTIONS
        and argument(loss, 5, "label_smoothing", 0.0) == 0.0
    )


def _path(graph: Graph, loss: Op) -> tuple[Op, ...]:
    """The operators from the cast of the logits of `loss` on; none if there is no such cast."""
    returned = {*graph.outputs, *(value for _, value in graph.updates)}
    found: list[Op] = []
    name = loss.operands[0]
    while (op := graph.producer.get(name)) is not None:
        readers = graph.consumers[name]
        if len(readers) != 1 or readers[0].operands.count(name) != 1 or name in returned:
            return ()
        found.insert(0, op)
        if op.kind == "_to_copy":
            dtypes = graph.tensor[op.operands[0]].dtype, graph.tensor[name].dtype
            return tuple(found) if dtypes[0] in HALF_DTYPES and dtypes[1] == "float32" else ()
        if op.kind not in _MOVES or len(op.operands) != 1 or len(op.outputs) != 1:
            return ()
        name = op.operands[0]
    return ()
