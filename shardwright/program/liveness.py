"""Liveness: the values of a graph that cross cuts between its operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import final

import numpy as np
from numpy.typing import NDArray

from shardwright.ir.graph import Graph, Leaf, LeafKind

Ints = NDArray[np.int64]


@final
class Liveness:
    """Birth and last reader, as operator indices, of each value that can cross a cut.

    With `copies` every stage has the parameters that it reads; otherwise a parameter is on one
    stage, and its value is passed on to later stages.
    """

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
            if name in self.free or self.is_copied(name):
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

    def is_copied(self, name: str) -> bool:
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
        """Values born before the cut and read after it, in the graph's order."""
        names, born, last = self._columns
        return tuple(names[i] for i in np.flatnonzero((born < cut) & (cut <= last)).tolist())

    def crossing_bytes(self) -> tuple[int, ...]:
        """Bytes handed on, forward, at the cut before each operator; -1 where none may be made."""
        names, born, last = self._columns
        count = len(self.graph.ops)
        sizes = np.array([self.graph.tensor[name].bytes for name in names], np.int64)
        change = np.zeros(count + 2, np.int64)
        np.add.at(change, born + 1, sizes)
        np.add.at(change, np.maximum(last, born) + 1, -sizes)
        found = change.cumsum()[:count]
        found[:1] = -1
        for first, made in self.updated.values():
            found[first + 1 : made + 1] = -1
        return tuple(found.tolist())

    def trained_births(self) -> tuple[int, ...]:
        """Per operator, the number of parameters with a gradient that it is the first to read."""
        found = [0] * len(self.graph.ops)
        for leaf in self.graph.leaves_of(LeafKind.PARAMETER):
            if self.graph.tensor[leaf.name].requires_grad and leaf.name in self.first:
                found[self.first[leaf.name]] += 1
        return tuple(found)

    @cached_property
    def _columns(self) -> tuple[tuple[str, ...], Ints, Ints]:
        """The names in `spans`, where they are born and where they are read last."""
        ends = np.array(list(self.spans.values()), np.int64).reshape(-1, 2)
        return tuple(self.spans), ends[:, 0], ends[:, 1]
