"""Attention masks that are just causal, found out by computing them.

While a model is traced, Hugging Face builds its causal mask as a tensor,
though it would pass `is_causal` otherwise. A mask costs memory, rules out the
fastest kernels and doubles the work. A mask that depends on no input is a
constant: it is computed once here, and where it is the lower triangle the
attention gets the flag instead.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.capture.operators import argument, call_op
from shardwright.ir.graph import Graph, Op

_GIVEN = ("attn_mask", "dropout_p", "is_causal")  # what the rewrite gives by position
_LARGEST_MASK = 2**27  # elements that are worth computing to find out


def without_causal_masks(graph: Graph) -> Graph:
    """`graph` with `is_causal` where the mask says nothing else."""
    verdicts: dict[str, bool] = {}

    def rewrite(op: Op) -> Op:
        if op.kind != "scaled_dot_product_attention" or len(op.operands) != 4:
            return op
        mask = op.operands[3]
        if mask not in verdicts:
            verdicts[mask] = _is_causal(graph, mask)
        if not verdicts[mask]:
            return op
        kwargs = tuple(pair for pair in op.kwargs if pair[0] not in _GIVEN)
        saves = tuple(name for name in op.saves if name != mask)
        dropped = argument(op, 4, "dropout_p", 0.0)
        return replace(op, args=(*op.args[:3], None, dropped, True), kwargs=kwargs, saves=saves)

    return replace(graph, ops=tuple(rewrite(op) for op in graph.ops))


def _is_causal(graph: Graph, mask: str) -> bool:
    """Whether the value `mask` is a constant: True up to the diagonal and False beyond it."""
    described = graph.tensor[mask]
    if described.dtype != "bool" or len(described.shape) < 2:
        return False
    rows, columns = described.shape[-2:]
    needed = _ancestors(graph, mask)
    if needed is None or rows * columns > _LARGEST_MASK:
        return False
    values: dict[str, torch.Tensor] = {}
    for op in needed:
        if any(graph.tensor[name].num_elements > _LARGEST_MASK for name in op.outputs[:1]) and (
            not graph.tensor[op.outputs[0]].alias_of
        ):
            return False
        results = call_op(op, values, torch.device("cpu"))
        values.update(zip(op.outputs, results, strict=True))
    # Leading dimensions are mostly expanded: one matrix stands for many.
    matrix = values[mask]
    while matrix.dim() > 2:
        if matrix.stride(0) != 0 and matrix.shape[0] > 1:
            return False
        matrix = matrix[0]
    causal = torch.ones(rows, columns, dtype=torch.bool, device="cpu").tril()
    return bool(torch.equal(matrix, causal))


def _ancestors(graph: Graph, value: str) -> list[Op] | None:
    """The operators that make `value` out of nothing, in order; None if it depends on a leaf."""
    found: dict[str, Op] = {}
    stack = [value]
    while stack:
        name = stack.pop()
        if name not in graph.producer:
            return None
        op = graph.producer[name]
        if op.name not in found:
            found[op.name] = op
            stack.extend(op.operands)
    order = {op.name: i for i, op in enumerate(graph.ops)}
    return sorted(found.values(), key=lambda op: order[op.name])
