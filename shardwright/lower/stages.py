"""Pipeline stages: a graph cut, in operator order, into graphs that run one after the other.

Stage k hands values to stage k+1 and to no other: what a later stage reads is
relayed. A parameter lives on the stage of its first reader; a later reader (a
tied embedding) gets its value handed on like an activation, so that its whole
gradient comes back to where it lives, or a copy of its own. What depends on neither parameters nor
state (masks, positions) is computed anew wherever it is read, as every stage is
given the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Tensor, verify

RECEIVED = "received."  # the keys of a stage's inputs that come from the stage before


class StageError(ValueError):
    """A graph that cannot be cut into the stages asked for."""


@dataclass(frozen=True)
class Stage:
    """One stage: its graph, what it takes from the stage before and what it hands on.

    `sent` are the first of the graph's outputs; the last stage sends nothing and
    returns what the whole graph returns.
    """

    graph: Graph
    received: tuple[str, ...]
    sent: tuple[str, ...]

    def returning_gradient(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of `names` that a gradient comes back for."""
        return tuple(name for name in names if self.graph.tensor[name].requires_grad)


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
    lives = _Lives(graph, copies)
    for cut in cuts:
        if buffer := lives.parts(cut):
            raise StageError(
                f"the cut before operator {cut} ({graph.ops[cut].name}) parts the buffer {buffer}"
                " from the operators that update it; cut before or after all of them"
            )
    crossing = [(), *(lives.crossing(cut) for cut in cuts), ()]
    last = len(positions) - 2
    return tuple(
        _stage(lives, start, end, crossing[k], crossing[k + 1] if k < last else None)
        for k, (start, end) in enumerate(pairwise(positions))
    )


def crossing_bytes(graph: Graph, *, copies: bool = False) -> tuple[int, ...]:
    """Bytes handed on, forward, at the cut before each operator; -1 where none may be made."""
    lives = _Lives(graph, copies)
    change = [0] * (len(graph.ops) + 2)
    for name, (born, last) in lives.spans.items():
        change[born + 1] += graph.tensor[name].bytes
        change[max(last, born) + 1] -= graph.tensor[name].bytes
    found, now = [], 0
    for position in range(len(graph.ops)):
        now += change[position]
        found.append(-1 if position == 0 or lives.parts(position) else now)
    return tuple(found)


def crossing_values(graph: Graph, cuts: Iterable[int]) -> Iterator[tuple[str, ...]]:
    """What is handed on at each cut where every stage has the parameters that it reads."""
    lives = _Lives(graph, copies=True)
    for cut in cuts:
        yield lives.crossing(cut)


def trained_births(graph: Graph) -> tuple[int, ...]:
    """Per operator, how many parameters with a gradient live on the stage that holds it."""
    lives, found = _Lives(graph), [0] * len(graph.ops)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        if graph.tensor[leaf.name].requires_grad and graph.consumers[leaf.name]:
            found[lives.spans[leaf.name][0]] += 1
    return tuple(found)


class _Lives:
    """Where each value that can cross a cut is born and last read, as operator indices."""

    def __init__(self, graph: Graph, copies: bool = False) -> None:
        self.graph = graph
        self.copies = copies  # of parameters, instead of handing them on
        self.index = {op.name: i for i, op in enumerate(graph.ops)}
        self.first = {n: self.index[ops[0].name] for n, ops in graph.consumers.items() if ops}

    @cached_property
    def updated(self) -> dict[str, tuple[int, int]]:
        """Buffers that change, with the first and last operator that must stay together."""
        found = {}
        for buffer, value in self.graph.updates:
            maker = self.graph.producer.get(value)
            made = self.index[maker.name] if maker else self.first.get(value, 0)
            found[buffer] = (min(self.first.get(buffer, made), made), made)
        return found

    @cached_property
    def free(self) -> frozenset[str]:
        """Values that any stage can compute from the batch, constants and unchanging buffers."""
        found = set()
        for leaf in self.graph.leaves:
            fixed = leaf.kind is LeafKind.BUFFER and leaf.name not in self.updated
            if fixed or leaf.kind in (LeafKind.INPUT, LeafKind.CONSTANT):
                found.add(leaf.name)
        for op in self.graph.ops:
            if found.issuperset(op.operands):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Birth and last reader of every value that is handed on if a cut lies between.

        Frozen parameters are not: they never change, so each reader's stage keeps a copy.
        Nor are others, with `copies`.
        """
        graph, end = self.graph, len(self.graph.ops) - 1
        found = {}
        for value in graph.values:
            name = value.name
            if name in self.free or self.held(name):
                continue
            maker = graph.producer.get(name)
            if maker is not None:
                born = self.index[maker.name]
            else:
                born = self.updated[name][1] if name in self.updated else self.first.get(name, 0)
            readers = graph.consumers[name]
            last = self.index[readers[-1].name] if readers else born
            found[name] = (born, end if name in graph.outputs else last)
        return found

    def held(self, name: str) -> bool:
        """Whether it is a parameter of which every stage that reads it has a copy."""
        leaf = self.leaf.get(name)
        parameter = leaf is not None and leaf.kind is LeafKind.PARAMETER
        return parameter and (self.copies or not self.graph.tensor[name].requires_grad)

    @cached_property
    def leaf(self) -> Mapping[str, Leaf]:
        return {leaf.name: leaf for leaf in self.graph.leaves}

    def parts(self, cut: int) -> str:
        """A buffer whose update the cut would part; empty if none."""
        return next((b for b, (first, made) in self.updated.items() if first < cut <= made), "")

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Values born before the cut and read behind it, in the graph's order."""
        return tuple(name for name, (born, last) in self.spans.items() if born < cut <= last)


def _stage(
    lives: _Lives, start: int, end: int, received: tuple[str, ...], sent: tuple[str, ...] | None
) -> Stage:
    """Operators `start` to `end`; `sent` is None on the last stage, which returns the results."""
    graph = lives.graph
    outputs = sent if sent is not None else graph.outputs
    updates = tuple(
        (buffer, value)
        for buffer, value in graph.updates
        if start <= lives.updated[buffer][1] < end
    )
    needed = {*outputs, *(name for pair in updates for name in pair)}
    kept: list[Op] = []
    for position in range(end - 1, -1, -1):
        op = graph.ops[position]
        free = lives.free.issuperset(op.outputs)
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
        habits=graph.habits,
    )
    verify(stage)
    return Stage(stage, received, sent or ())


def _described(value: Tensor, received: tuple[str, ...]) -> Tensor:
    """What is received has memory of its own."""
    return replace(value, alias_of="") if value.name in received else value
