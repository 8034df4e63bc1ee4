"""Rewrites the last projection and its cross entropy as one operator that works in chunks.

The logits of a language model (tokens x vocabulary, in the dtype of the model, in float32, and
their gradients) are often the peak of memory. `linear -> cast, views -> cross_entropy_loss`
becomes `shardwright.linear_cross_entropy`, which computes them for one part of the vocabulary at a
time. Views and slices of logits become views and slices of the hidden states.

Chunks are parts of the vocabulary, not of the tokens. So the gradient of the weight is one product
for each part, rounded as the module's is, no copy of the weight's size adds it up, and devices that
share a vocabulary exchange statistics once. The gradient of the hidden states is a sum over parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.ir.graph import ITEM_BYTES, Arg, Graph, Op, Ref, Symbol, Tensor, argument
from shardwright.rules.operators.views import RESHAPES

LINEAR_CROSS_ENTROPY = "shardwright.linear_cross_entropy.default"
# args: x, weight, bias, target, class weights, ignore_index, label_smoothing, chunks, logits dtype
CHUNKS, DTYPE = 7, 8  # positions among its arguments

_SUM = 2  # ATen's Reduction enum
_SAME = ("clone", "contiguous", "alias")


class LossChunksError(ValueError):
    """A graph whose loss cannot be computed in chunks."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """A cross entropy, the projection to its logits, and the operators between, in order."""

    linear: Op
    steps: tuple[Op, ...]
    loss: Op


def with_loss_chunks(graph: Graph, count: int) -> Graph:
    """`graph` with each projection and cross entropy that permit it in `count` chunks.

    Raises `LossChunksError`, with the reason, if none does.
    """
    numerics = replace(graph.numerics, loss_chunks=count)
    if count == 1:
        return replace(graph, numerics=numerics)
    found, reasons = [], []
    for op in _cross_entropies(graph):
        try:
            found.append(_loss(graph, op))
        except LossChunksError as e:
            reasons.append(str(e))
    if not found:
        why = reasons[0] if reasons else "the model computes no cross entropy"
        raise LossChunksError(f"loss_chunks={count} is not possible: {why}; leave it out")
    ops, values = dict(graph.op), dict(graph.tensor)
    for one in found:
        _rewrite(one, count, ops, values)
    return replace(
        graph,
        ops=tuple(ops[op.name] for op in graph.ops if op.name in ops),
        values=tuple(values[value.name] for value in graph.values if value.name in values),
        numerics=numerics,
    )


def most_logits(graph: Graph) -> tuple[int, int]:
    """Rows and classes of the largest logits that chunks would divide; zeros if there are none."""
    shapes = [(0, 0)]
    for op in _cross_entropies(graph):
        try:
            rows, classes = graph.tensor[_loss(graph, op).loss.operands[0]].shape
        except LossChunksError:
            continue
        shapes.append((rows, classes))
    return max(shapes, key=lambda shape: shape[0] * shape[1])


def fused_chunks(graph: Graph) -> int:
    """The chunks of the vocabulary whose logits are about as large as the hidden states.

    Liger's kernels cut the tokens into about as many. Raises `LossChunksError`, with the reason, if
    no loss of `graph` can be computed in chunks.
    """
    found, reasons = [], ["the model computes no cross entropy"]
    for op in _cross_entropies(graph):
        try:
            weight = _loss(graph, op).linear.operands[1]
        except LossChunksError as e:
            reasons.append(str(e))
            continue
        classes, width = graph.tensor[weight].shape
        found.append(-(-classes // width))
    if not found:
        raise LossChunksError(reasons[-1])
    return max(2, *found)


def _cross_entropies(graph: Graph) -> Iterator[Op]:
    return (op for op in graph.ops if op.kind == "cross_entropy_loss")


def _loss(graph: Graph, loss: Op) -> _Loss:
    """The operators that end in `loss`; raises `LossChunksError` for those of another form."""
    logits = graph.tensor[loss.operands[0]]
    if argument(loss, 3, "reduction", 1) != _SUM or len(logits.shape) != 2:
        raise LossChunksError("its cross entropy is no sum or mean over rows of logits")
    if "int" not in graph.tensor[loss.operands[1]].dtype:
        raise LossChunksError("its cross entropy takes a probability for each class")
    steps: list[Op] = []
    name, classes = logits.name, logits.shape[-1]
    returned = {*graph.outputs, *(value for _, value in graph.updates)}
    while True:
        readers = graph.consumers[name]
        if name in returned:
            raise LossChunksError("its logits are returned")
        if len(readers) != 1 or readers[0].operands.count(name) != 1:
            raise LossChunksError(f"its logits are also read by {readers[-1].source}")
        op = graph.producer.get(name)
        if op is not None and op.kind == "linear":
            return _Loss(op, tuple(reversed(steps)), loss)
        cast = any(step.kind == "_to_copy" for step in steps)
        if op is None or not _passes(graph, op, classes) or (cast and op.kind == "_to_copy"):
            made = f"come from {op.kind} in {op.source}" if op is not None else "are an input"
            raise LossChunksError(f"its logits {made}, and not from a linear layer")
        steps.append(op)
        name = op.operands[0]


def _passes(graph: Graph, op: Op, classes: int) -> bool:
    """Whether an operator between logits leaves their classes as they are."""
    if len(op.operands) != 1 or len(op.outputs) != 1:
        return False
    before, after = graph.tensor[op.operands[0]], graph.tensor[op.outputs[0]]
    if before.shape[-1:] != (classes,) or after.shape[-1:] != (classes,):
        return False
    if op.kind == "_to_copy":
        return "float" in after.dtype
    if op.kind == "slice":
        dim = argument(op, 1, "dim", 0)
        return isinstance(dim, int) and dim % len(before.shape) != len(before.shape) - 1
    return op.kind in RESHAPES or op.kind in _SAME


def _rewrite(one: _Loss, count: int, ops: dict[str, Op], values: dict[str, Tensor]) -> None:
    """Replace the operators and values of one loss."""
    hidden = one.linear.args[0]
    assert isinstance(hidden, Ref)
    dtype = values[one.loss.outputs[0]].dtype  # in which the loss reads its logits
    now = hidden.name  # the hidden states in place of the logits so far
    for step in one.steps:
        made = values[step.outputs[0]]
        if step.kind == "_to_copy":
            del ops[step.name], values[made.name]
            continue
        given = values[now]
        shape = (*made.shape[:-1], given.shape[-1])
        args: tuple[Arg, ...] = (Ref(now), *step.args[1:])
        ops[step.name] = replace(step, args=args)
        if step.kind in RESHAPES:
            target = "aten.view.default" if made.alias_of else "aten.reshape.default"
            ops[step.name] = replace(step, target=target, args=(Ref(now), shape), kwargs=())
        values[made.name] = replace(
            given, name=made.name, shape=shape, alias_of=now if made.alias_of else ""
        )
        now = made.name
    del ops[one.linear.name], values[one.linear.outputs[0]]
    ops[one.loss.name] = _operator(one, now, count, dtype, values)


def _operator(one: _Loss, hidden: str, count: int, dtype: str, values: dict[str, Tensor]) -> Op:
    """The operator of one loss on the hidden states `hidden`, with logits cast to `dtype`.

    For each token it keeps a normalizer and the weight of its terms.
    """
    smoothing = argument(one.loss, 5, "label_smoothing", 0.0)
    args = (
        Ref(hidden),
        one.linear.args[1],
        argument(one.linear, 2, "bias"),
        one.loss.args[1],
        argument(one.loss, 2, "weight"),
        argument(one.loss, 4, "ignore_index", -100),
        smoothing,
        count,
        Symbol("dtype", dtype),
    )
    found = replace(
        one.loss, target=LINEAR_CROSS_ENTROPY, args=args, kwargs=(), source=one.linear.source
    )
    statistics = 2 * max(4, ITEM_BYTES[dtype]) * values[hidden].shape[0]
    trained = values[one.loss.outputs[0]].requires_grad
    saves = tuple(dict.fromkeys(found.operands)) if trained else ()
    return replace(found, saves=saves, extra_saved=statistics if trained else 0)
