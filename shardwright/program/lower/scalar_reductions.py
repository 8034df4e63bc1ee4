"""Defers all-reduces of scalars so that no rank waits for them.

A mean over all samples is a sum divided by a sum of weights. Both are all-reduced between the
forward and the backward pass, where every rank would wait for the slowest one. Sums that depend
on the batch alone are moved to the beginning, where the ranks are still synchronous. The loss is
summed last, after the numbers by which it is scaled, and a step waits for it after the backward
pass (`program/step/passes/late_results.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardwright.ir.graph import Graph, LeafKind, Ref
from shardwright.ir.redistribution import Collective
from shardwright.program.instructions import (
    Compute,
    Instruction,
    Load,
    Program,
    Redistribute,
    reads,
    writes,
)
from shardwright.rules.deferrable_scalars import SCALINGS


def early_sums(program: Program, graph: Graph) -> Program:
    """`program` with the reductions of scalars that depend only on inputs moved to its start."""
    given = {leaf.name for leaf in graph.leaves_of(LeafKind.INPUT)}
    wanted: set[str] = set()
    for one in program.instructions:
        if isinstance(one, Compute | Redistribute) and given.issuperset(reads(one)):
            given.update(writes(one))
            if _sums_a_number(one):
                wanted.update(writes(one))
    first: list[Instruction] = []
    for one in reversed(program.instructions):
        if not wanted.isdisjoint(writes(one)):
            wanted.update(reads(one))
            first.append(one)
    moved = {name for one in first for name in writes(one)}
    others = [one for one in program.instructions if moved.isdisjoint(writes(one))]
    return replace(program, instructions=(*reversed(first), *others))


def late_sums(program: Program, graph: Graph) -> Program:
    """`program` with results reduced after they are scaled, not before."""
    for output in program.outputs:
        scalings = _scalings(program, graph, output)
        if scalings:
            program = _summed_last(program, output, scalings[0])
    return program


def _scalings(program: Program, graph: Graph, output: str) -> list[Compute]:
    """The chain of operators from a reduced scalar to `output`, if each of them only scales it.

    A scale must not be trained, because its gradient depends on the reduced sum.
    """
    made = {name: one for one in program.instructions for name in writes(one)}
    read = Counter(name for one in program.instructions for name in reads(one))
    read.update((*program.outputs, *(value for _, value in program.updates)))
    found: list[Compute] = []
    name = output
    while read[name] == 1:
        one = made.get(name)
        if isinstance(one, Redistribute):
            return found if one.differentiable and _sums_a_number(one) else []
        if not isinstance(one, Compute) or one.op.target not in SCALINGS or one.shapes != ((),):
            break
        first, *scales = one.op.operands
        if one.op.args[0] != Ref(first) or any(_is_trained(s, made, graph) for s in scales):
            break
        found.insert(0, one)
        name = first
    return []


def _is_trained(name: str, made: Mapping[str, Instruction], graph: Graph) -> bool:
    """Whether a value gets a gradient; assumed for values that are not in the graph."""
    while isinstance(one := made.get(name), Redistribute | Load):
        name = one.value if isinstance(one, Redistribute) else one.leaf
    return name not in graph.tensor or graph.tensor[name].requires_grad


def _summed_last(program: Program, output: str, scaling: Compute) -> Program:
    """`program` with the reduction moved from before `scaling` to the end, onto `output`."""
    (summed,) = (one for one in program.instructions if scaling.op.operands[0] in writes(one))
    assert isinstance(summed, Redistribute)
    op = replace(scaling.op, args=(Ref(summed.value), *scaling.op.args[1:]))
    last = replace(summed, value=output, result=f"{output}/summed")
    scaled = replace(scaling, op=op)
    instructions = [
        scaled if one is scaling else one for one in program.instructions if one is not summed
    ]
    outputs = tuple(last.result if name == output else name for name in program.outputs)
    return replace(program, instructions=(*instructions, last), outputs=outputs)


def _sums_a_number(one: Compute | Redistribute) -> bool:
    """Whether an instruction is an all-reduce of a scalar and nothing else."""
    return (
        isinstance(one, Redistribute)
        and one.before == one.after == ()
        and one.cast is None
        and bool(one.forward)
        and all(move.collective is Collective.ALL_REDUCE for move in one.forward)
        and not any(move.collective.moves_data for move in one.backward)
    )
