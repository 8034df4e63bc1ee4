"""Predicts which operators `torch.compile` fuses into one kernel, and the traffic that it saves.

Consecutive elementwise operators and row-wise reductions, without a matrix product or another
operator that is not fused between them, become one kernel. Values between them are neither written
to memory nor read, and there is one launch, forward and backward. Layers are compiled one by one,
as in torchtitan, so nothing is fused across or outside of layers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir.graph import Graph, Op
from shardwright.rules.rule import FactorKind, Rule

_LAYER = re.compile(r"(.*?\.)?\d+(?=\.|$)")
# Operators over whole rows for which the compiler generates code.
_ROWS = frozenset(
    {"softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm",
     "rms_norm", "group_norm"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fusion:
    """The memory traffic that an operator saves as part of a fused kernel.

    Attributes:
        operands: for each operand, whether it is not read from memory.
        results: for each result, whether it is not written to memory.
        joins: whether the kernel's launch is counted for another operator.
        added: for each result, the number of its gradients that are added to the first: there is
            one from each reader outside of the kernel, and one from all readers in it.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    joins: bool
    added: tuple[int, ...]


def fusions(graph: Graph, rules: Mapping[str, Rule]) -> dict[str, Fusion]:
    """The operators of `graph` that share a kernel with others, by name, and their savings."""
    kernels = _kernels(graph, rules)
    readers = _readers(graph)
    ends = {*graph.outputs, *(value for _, value in graph.updates)}
    found: dict[str, Fusion] = {}
    for members in kernels:
        inside = {op.name for op in members}
        known: set[str] = set()
        for number, op in enumerate(members):
            operands = []
            for name in op.operands:
                operands.append(name in known)
                known.add(name)
            results, added = [], []
            for name in op.outputs:
                reading = [one.name for one in readers[name]]
                stays = bool(reading) and inside.issuperset(reading) and name not in ends
                results.append(stays)
                others = {one for one in reading if one not in inside}
                added.append(max(0, len(others) + (len(others) < len(reading)) - 1))
                known.update(_views(name, graph))
            found[op.name] = Fusion(
                tuple(operands), tuple(results), joins=number > 0, added=tuple(added)
            )
    return found


def _kernels(graph: Graph, rules: Mapping[str, Rule]) -> Iterator[Sequence[Op]]:
    """The operators of each kernel of more than one, in order.

    The level of a value is the largest number of operators that are not fused on a path to it; so
    there are none on a path between operators of one level.
    """
    level: dict[str, int] = {}
    source: dict[str, Op] = {}  # the fused operator that made a value or its base
    level_of: dict[str, int] = {}
    kernel: dict[str, str] = {}  # operator -> another of its kernel, or itself

    def first(name: str) -> str:
        while kernel[name] != name:
            name = kernel[name]
        return name

    for op in graph.ops:
        before = max((level.get(name, 0) for name in op.operands), default=0)
        if is_view(op, graph):
            level.update(dict.fromkeys(op.outputs, before))
            made = [source[name] for name in op.operands if name in source]
            source.update((name, made[0]) for name in op.outputs if made)
            continue
        fused = _is_fused(op, rules[op.name])
        level.update(dict.fromkeys(op.outputs, before + (not fused)))
        if not fused:
            continue
        level_of[op.name], kernel[op.name] = before, op.name
        source.update(dict.fromkeys(op.outputs, op))
        for name in op.operands:
            maker = source.get(name)
            near = maker is not None and level_of[maker.name] == before
            if maker is not None and near and _layer(maker) == _layer(op):
                kernel[first(op.name)] = first(maker.name)
    members: defaultdict[str, list[Op]] = defaultdict(list)
    for op in graph.ops:
        if op.name in kernel:
            members[first(op.name)].append(op)
    yield from (found for found in members.values() if len(found) > 1)


def is_view(op: Op, graph: Graph) -> bool:
    """Whether all results of an operator are views of its operands."""
    return bool(op.outputs) and all(graph.tensor[name].alias_of for name in op.outputs)


def _is_fused(op: Op, rule: Rule) -> bool:
    """Whether the compiler generates an operator's code, within a layer."""
    if rule.work or not op.target.startswith("aten.") or not _layer(op):
        return False
    whole = any(factor.kind is FactorKind.WHOLE for factor in rule.factors)
    return op.kind in _ROWS or not whole


def _layer(op: Op) -> str:
    """The module path of an operator's layer, up to its first number; "" outside of layers."""
    match = _LAYER.match(op.source.module)
    return "" if match is None else match[0]


def _readers(graph: Graph) -> Mapping[str, Sequence[Op]]:
    """For each value, the operators other than views that read it or a view of it."""
    found: defaultdict[str, list[Op]] = defaultdict(list)
    for op in reversed(graph.ops):
        for name in op.operands:
            if is_view(op, graph):
                found[name] += [one for made in op.outputs for one in found[made]]
            else:
                found[name].append(op)
    return found


def _views(name: str, graph: Graph) -> Iterator[str]:
    """The value `name` and all views of it."""
    yield name
    for op in graph.consumers[name]:
        if is_view(op, graph):
            for made in op.outputs:
                yield from _views(made, graph)
