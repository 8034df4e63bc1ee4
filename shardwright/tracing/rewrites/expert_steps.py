"""Reads the steps between the two products of experts, and what autograd saves of a mixture.

Both forms of mixtures that are rewritten have them in common: grouped products of sorted rows
(`mixtures.py`) and batched products of all rows (`dense_mixtures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwright.ir.graph import Arg, Graph, Op, Ref, Tensor, json_argument, whole_numbers
from shardwright.rules.operators.steps import EVERY, EXPERTS_BIASES, PART
from shardwright.tracing.export.operators import call_op
from shardwright.tracing.gradients.autograd import AutogradFacts, observe

_LOGICAL = ("_to_copy", "clone", "alias", "contiguous")


class NotAMixtureError(Exception):
    """Raised for a candidate that is not a mixture of experts of the known form."""


def require(fact: bool) -> None:
    """Raise `NotAMixtureError` unless `fact` is true."""
    if not fact:
        raise NotAMixtureError


def steps_between(graph: Graph, made: str, down: Op, goal: str) -> list[Any]:
    """The steps from `made` to the operand `goal` of `down`, as JSON values for `experts.experts`.

    A step is [operator, args, kwargs]. {"value": i} refers to `made` (0) or to step i. Features are
    last. Raises `NotAMixtureError` if anything else reads a value between, or one of the steps
    mixes rows.
    """
    number = {made: 0}
    steps: list[Any] = []
    inside = _descendants(graph, made, goal)
    for op in inside:
        require(all(name in number for name in op.operands))
        if op.kind == "slice":
            number[op.outputs[0]] = len(steps) + 1
            steps.append([EVERY, [{"value": number[op.operands[0]]}, *_every(graph, op)], {}])
            continue
        if op.kind in ("split", "split_with_sizes", "chunk"):
            _require_last(
                graph, op, op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 0)
            )
            sizes = {graph.tensor[name].shape[-1] for name in op.outputs}
            require(len(sizes) == 1)
            for i, name in enumerate(op.outputs):
                number[name] = len(steps) + 1
                given = {"value": number[op.operands[0]]}
                steps.append([PART, [given, i, len(op.outputs)], {}])
            continue
        require(is_elementwise(op))
        try:
            args = [json_argument(a, number) for a in op.args]
            kwargs = {key: json_argument(a, number) for key, a in op.kwargs}
        except ValueError:
            raise NotAMixtureError from None
        number[op.outputs[0]] = len(steps) + 1
        steps.append([op.target, args, kwargs])
    require(bool(steps) and number.get(goal) == len(steps))
    require(not {PART, EVERY} <= {step[0] for step in steps})
    require(returned(graph).isdisjoint(number))
    for name in number:
        readers = {op.name for op in graph.consumers[name]}
        require(readers <= {down.name, *(op.name for op in inside)})
    return steps


def returned(graph: Graph) -> set[str]:
    """The values that a graph returns, as outputs or as new contents of buffers."""
    return {*graph.outputs, *(value for _, value in graph.updates)}


def is_elementwise(op: Op) -> bool:
    """Whether each element of the result depends on the elements at its place alone."""
    target = getattr(torch.ops.aten, op.kind, None)
    tags = getattr(getattr(target, op.target.split(".")[2], None), "tags", ())
    return torch.Tag.pointwise in tags or op.kind in _LOGICAL


def _every(graph: Graph, op: Op) -> tuple[int, int]:
    """The number of a part and the number of parts, where `op` takes every n-th feature."""
    _, *given = op.args
    require(len(given) == 4 and all(isinstance(one, int) for one in given))
    dim, start, end, step = whole_numbers(tuple(given))
    _require_last(graph, op, dim)
    size = graph.tensor[op.operands[0]].shape[-1]
    require(0 <= start < step and end >= size and size % step == 0)
    return start, step


def _descendants(graph: Graph, start: str, goal: str) -> list[Op]:
    """The operators that compute `goal` from `start`, in the order of the graph."""
    wanted: dict[str, Op] = {}
    stack = [goal]
    while stack:
        name = stack.pop()
        if name == start:
            continue
        require(name in graph.producer)
        op = graph.producer[name]
        if op.name not in wanted:
            wanted[op.name] = op
            stack.extend(op.operands)
        require(len(wanted) < 32)
    return [op for op in graph.ops if op.name in wanted]


def _require_last(graph: Graph, op: Op, dim: Arg) -> None:
    require(dim in (-1, len(graph.tensor[op.operands[0]].shape) - 1))


def with_facts(op: Op, tensors: Mapping[str, Tensor]) -> Op:
    """A mixture with the facts of what autograd saves; `tensors` describe its operands.

    Observations at twice the inner width separate the bytes that scale with it, at a width of
    tokens at which the same tensors are kept (`experts.scales_inside`). Raises `NotAMixtureError`
    where products share weights, of which both widths would be multiplied.
    """
    require(len({*op.operands[3:]}) == len(op.operands[3:]))
    whole = _observed(op, tensors)
    saves = tuple(dict.fromkeys(op.operands))
    saves = tuple(saves[i] for i in whole.saved_operands)
    down = tensors[op.operands[4]].shape[_inner_dim(op, 4)]
    wider = 2 if down < tensors[op.operands[0]].shape[1] else 1
    twice, once = (_observed(op, tensors, inner, wider).extra_saved for inner in (2, 1))
    return replace(
        op,
        saves=saves,
        extra_saved=whole.extra_saved,
        extra_rows=whole.extra_saved - (twice - once),
    )


def _observed(
    op: Op, tensors: Mapping[str, Tensor], inner: int = 1, width: int = 1
) -> AutogradFacts:
    """The autograd facts of the mixture with its widths multiplied."""
    operands = list(dict.fromkeys(op.operands))
    times = {op.operands[0]: {1: width}}
    for operand in (3, 4):
        dim = _inner_dim(op, operand)
        times[op.operands[operand]] = {dim: inner, 3 - dim: width}
    for bias, wider in zip(op.args[EXPERTS_BIASES], (inner, width), strict=False):
        times |= {bias.name: {1: wider}} if isinstance(bias, Ref) else {}
    leaves = []
    for name in operands:
        tensor = tensors[name]
        each = times.get(name, {})
        shape = [size * each.get(dim, 1) for dim, size in enumerate(tensor.shape)]
        leaf = torch.empty(shape, dtype=getattr(torch, tensor.dtype), device="meta")
        leaves.append(leaf.requires_grad_(tensor.requires_grad))

    def call(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return call_op(op, dict(zip(operands, values, strict=True)), torch.device("meta"))

    return observe(call, leaves)


def _inner_dim(op: Op, operand: int) -> int:
    """The dimension of inner width of `up` (3) or `down` (4), which has it last if it is turned."""
    turned = op.args[5]
    assert isinstance(turned, tuple)
    is_last = turned[operand - 3] == (operand == 4)
    return 2 if is_last else 1
