"""Calls of operators at other sizes: what the laws are tried on beside the sizes written down."""

import math
from dataclasses import replace
from itertools import combinations

import torch

from shardwright.ir.graph import Graph, Tensor
from shardwright.tracing.export.operators import call_op
from tests.harness.operator_calls import OneOp

_SMALLEST_FREE = 5  # smaller numbers are windows, strides and dimensions as often as sizes
_GATES = {"lstm": (16,), "gru": (12,)}


def free_sizes(one):
    """The sizes of a call's operands that other sizes may stand for.

    Not those that kernels do not check: what 32-bit operands hold, which are offsets of groups,
    and gates times the width of a recurrent state.
    """
    values = one.values.values()
    sizes = {size for value in values for size in value.shape}
    held = {int(value.max()) for value in values if value.dtype == torch.int32}
    held.update(_GATES.get(one.op.kind, ()))
    return sorted(size for size in sizes - held if size >= _SMALLEST_FREE)


def resized(one, sizes):
    """The call with as many of its `sizes` replaced as the operator takes, and which those are.

    Arguments that equal a size, or the product of two, are replaced too.
    """
    keys = [key for key in sizes if sizes[key] != key]
    for count in range(len(keys), 0, -1):
        for kept in combinations(keys, count):
            found = _call(one, {key: sizes[key] for key in kept})
            if found is not None:
                return found, kept
    return one, ()


def _call(one, sizes):
    values = {name: _value(value, sizes) for name, value in one.values.items()}
    known = dict(sizes)
    every = {size for value in one.values.values() for size in value.shape}
    for a in every:
        for b in every:
            known.setdefault(a * b, sizes.get(a, a) * sizes.get(b, b))
    op = replace(
        one.op,
        args=tuple(_arg(arg, known) for arg in one.op.args),
        kwargs=tuple((key, _arg(value, known)) for key, value in one.op.kwargs),
    )
    try:
        results = _results(one, op, values)
    except Exception:  # sizes that do not go together: fewer are tried
        return None
    if len(results) != len(op.outputs):  # another number of pieces
        return None
    if not all(result.numel() for result in results):  # nothing is left to be split
        return None
    described = [*values.items(), *zip(op.outputs, results, strict=True)]
    graph = Graph(
        leaves=one.graph.leaves,
        ops=(op,),
        outputs=op.outputs,
        values=tuple(
            Tensor(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for name, t in described
        ),
    )
    return OneOp(one.name, graph, values, tuple(results))


def _results(one, op, values):
    if op.kind == "dropout":
        return [next(iter(values.values())).clone()]
    return call_op(op, values, torch.device("cpu"))


def _value(value, sizes):
    """Numbers of the same kind: drawn from those there are, and indices that stay in bounds."""
    shape = [sizes.get(size, size) for size in value.shape]
    if not shape or value.dtype == torch.int32:
        return value
    at = torch.arange(math.prod(shape)) * 7 % value.numel()
    drawn = value.detach().flatten()[at].view(shape)
    if drawn.dtype == torch.int64:
        drawn = drawn % min(sizes.values())
    return drawn.requires_grad_(value.requires_grad)


def _arg(arg, sizes):
    if isinstance(arg, tuple):
        return tuple(_arg(a, sizes) for a in arg)
    if isinstance(arg, int) and not isinstance(arg, bool) and arg >= _SMALLEST_FREE:
        return sizes.get(arg, arg)
    return arg
