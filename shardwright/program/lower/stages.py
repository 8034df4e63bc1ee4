"""Cuts a graph, in operator order, into pipeline stages.

Stage k sends values to stage k+1 alone: a value that a later stage reads is relayed. A parameter is
stored on the stage of its first reader. A later reader (a tied embedding) gets its value relayed
like an activation, so that its whole gradient returns to the stage that stores it, or has a copy of
its own. Values that depend on neither parameters nor state (masks, positions) are recomputed on
every stage that reads them, as every stage is given the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Tensor, verify
from shardwright.program.liveness import Liveness

RECEIVED = "received."  # the keys of a stage's inputs that come from the stage before


class StageError(ValueError):
    """A graph that cannot be cut into the stages asked for."""


@dataclass(frozen=True)
class Stage:
    """One stage: its graph, the values that it receives from the stage before and those it sends.

    `sent` are the first of the graph's outputs; the last stage sends nothing and
    returns what the whole graph returns.
    """

    graph: Graph
    received: tuple[str, ...]
    sent: tuple[str, ...]


def splits_backward(stage: Stage) -> bool:
    """Whether torch can compute a stage's gradients of inputs and of weights apart.

    It starts once from each operator that reads a weight and what is received.
    Where weights meet what is received only after something has been computed of
    them alone, or twice, these starts are in each other's way.
    """
    return _splits(stage.graph, stage.graph.ops, stage.received)


def splits_between(liveness: Liveness, start: int, end: int) -> bool:
    """`splits_backward` of the stage of operators `start` to `end`, which need not be made."""
    received = liveness.crossing(start) if start else ()
    return _splits(liveness.graph, liveness.graph.ops[start:end], received)


def _splits(graph: Graph, ops: Sequence[Op], handed_on: Iterable[str]) -> bool:
    """Whether gradients of inputs and of weights of some operators can be computed apart."""
    received = set(handed_on)
    weights = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    read: set[str] = set()
    for op in ops:
        if received.intersection(op.operands):
            received.update(op.outputs)
        elif any(graph.tensor[name].requires_grad for name in op.outputs):
            return False
        mine = weights.intersection(op.operands)
        if not read.isdisjoint(mine):
            return False
        read |= mine
    return True


def split(graph: Graph, cuts: Sequence[int], *, copies: bool = False) -> tuple[Stage, ...]:
    """The stages of `graph`, cut before each operator whose index is in `cuts`.

    With `copies` every stage that reads a parameter has it, and its gradient is
    the sum of theirs.

    Run in order they compute what the whole graph computes, and their backward
    passes in reverse order its gradients. Raises `StageError` for cuts that are
    not increasing, or that part a buffer from the operators that update it.
    """
    positions = (0, *cuts, len(graph.ops))
    if any(a >= b for a, b in pairwise(positions)):
        raise StageError(
            f"cuts {list(cuts)} of {len(graph.ops)} operators must increase, from 1 to"
            f" {len(graph.ops) - 1}"
        )
    liveness = Liveness(graph, copies)
    for cut in cuts:
        if buffer := liveness.parts(cut):
            raise StageError(
                f"the cut before operator {cut} ({graph.ops[cut].name}) parts the buffer {buffer}"
                " from the operators that update it; cut before or after all of them"
            )
    crossing = [(), *(liveness.crossing(cut) for cut in cuts), ()]
    last = len(positions) - 2
    return tuple(
        _stage(liveness, start, end, crossing[k], crossing[k + 1] if k < last else None)
        for k, (start, end) in enumerate(pairwise(positions))
    )


def _stage(
    liveness: Liveness,
    start: int,
    end: int,
    received: tuple[str, ...],
    sent: tuple[str, ...] | None,
) -> Stage:
    """Operators `start` to `end`; `sent` is None on the last stage, which returns the results."""
    graph = liveness.graph
    outputs = sent if sent is not None else graph.outputs
    updates = tuple(
        (buffer, value)
        for buffer, value in graph.updates
        if start <= liveness.updated[buffer][1] < end
    )
    needed = {*outputs, *(name for pair in updates for name in pair)}
    kept: list[Op] = []
    for position in range(end - 1, -1, -1):
        op = graph.ops[position]
        free = liveness.free.issuperset(op.outputs)
        here = position >= start and not free
        if here or (free and needed.intersection(op.outputs)):
            kept.append(op)
            needed.update(op.operands)
            needed.update(op.outputs)
    leaves = [Leaf(name, LeafKind.INPUT, (RECEIVED + name,)) for name in received]
    for leaf in graph.leaves:
        idle = not graph.consumers[leaf.name] and leaf.kind is LeafKind.PARAMETER and start == 0
        if (leaf.name in needed or idle) and leaf.name not in received:
            leaves.append(leaf)
    found = {*(leaf.name for leaf in leaves), *(name for op in kept for name in op.outputs)}
    stage = Graph(
        leaves=tuple(leaves),
        ops=tuple(reversed(kept)),
        outputs=outputs,
        values=tuple(_described(v, received) for v in graph.values if v.name in found),
        updates=updates,
        constants=graph.constants,
        note=graph.note,
        numerics=graph.numerics,
    )
    verify(stage)
    return Stage(stage, received, sent or ())


def _described(value: Tensor, received: tuple[str, ...]) -> Tensor:
    """`value` as a stage sees it: a received value is no view, it has memory of its own."""
    return replace(value, alias_of="") if value.name in received else value


def needs_one_stage(graph: Graph) -> str:
    """Why `graph` cannot be cut into stages, whatever the cuts; empty if it can."""
    for leaf in graph.leaves_of(LeafKind.INPUT):
        if graph.tensor[leaf.name].requires_grad:
            return (
                f"pipelines are not possible: their stages give no gradient of the batch, and"
                f" {leaf.keys[0]} requires one; detach it, or plan with stages=(1,)"
            )
    return ""
