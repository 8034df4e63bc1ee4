"""Candidate cuts of a graph into pipeline stages, and the values that cross them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import final

import numpy as np

from shardwright.ir.graph import Graph, LeafKind
from shardwright.program.liveness import Liveness
from shardwright.program.lower.stages import splits_between
from shardwright.solve.elimination.problem import Bools, Ints

_FEW_POSITIONS, _MOST_POSITIONS = 40, 400  # candidate positions of a graph of few stages


@final
class StageCuts:
    """Finds the operator indices at which a pipeline stage of one graph may begin.

    A stage holds all parameters that it reads.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._liveness = Liveness(graph, copies=True)
        self._crossing: dict[int, tuple[str, ...]] = {}
        self._splits: dict[tuple[int, int], bool] = {}

    def positions(self, groups: int) -> Ints:
        """Candidate positions, those crossed by the fewest bytes, and both ends of the graph.

        Of too many that equally many bytes cross, every second is one, or every third, ..., so that
        equal layers can be equal stages.
        """
        crossing = self._bytes
        may = np.flatnonzero(crossing >= 0)
        few = max(_FEW_POSITIONS, 4 * groups)
        if len(may) > few:
            most = np.sort(crossing[may])[few - 1]
            fewer, equal = may[crossing[may] < most], may[crossing[may] == most]
            left = max(_MOST_POSITIONS, few) - len(fewer)
            may = np.union1d(fewer, equal[:: -(-len(equal) // left)])
        return np.concatenate(([0], may, [len(self.graph.ops)])).astype(np.int64)

    def allow(self, groups: int) -> bool:
        """Whether the graph can have `groups` stages, each with parameters of its own."""
        return len(np.unique(self._births[self.positions(groups)])) > groups

    def trains(self, positions: Ints) -> Bools:
        """Whether each interval has trained parameters of its own for its optimizer: (C, C)."""
        births = self._births[positions]
        found: Bools = births[None, :] > births[:, None]
        return found

    def refused(self, cuts: Sequence[int]) -> str:
        """Why stages cannot begin at these operators, in order; empty if they can."""
        for before, cut in pairwise([0, *cuts]):
            name = self.graph.ops[cut].name
            if cut <= before:
                return f"the stage that begins with {name} is empty, or comes before an earlier one"
            if self._bytes[cut] < 0:
                return f"no stage may begin with {name}, between what reads a buffer and updates it"
        ends = np.array([0, *cuts, len(self.graph.ops)], np.int64)
        for start, own in zip(ends.tolist(), np.diff(self._births[ends]).tolist(), strict=False):
            if not own:
                name = self.graph.ops[start].name
                return f"the stage that begins with {name} has no trained parameter of its own"
        return ""

    def crossing(self, position: int) -> tuple[str, ...]:
        """The values that cross a position."""
        if position not in self._crossing:
            self._crossing[position] = self._liveness.crossing(position)
        return self._crossing[position]

    def splits(self, begin: int, end: int) -> bool:
        """Whether the stage between two positions can compute gradients of weights separately."""
        if (begin, end) not in self._splits:
            self._splits[begin, end] = splits_between(self._liveness, begin, end)
        return self._splits[begin, end]

    @cached_property
    def read_again(self) -> tuple[tuple[str, Ints], ...]:
        """Parameters that several operators read, with the indices of these operators."""
        graph, number = self.graph, self._liveness.index
        return tuple(
            (leaf.name, np.array([number[op.name] for op in readers], np.int64))
            for leaf in graph.leaves_of(LeafKind.PARAMETER)
            if len(readers := graph.consumers[leaf.name]) > 1
        )

    @cached_property
    def _bytes(self) -> Ints:
        return np.array(self._liveness.crossing_bytes(), np.int64)

    @cached_property
    def _births(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self._liveness.trained_births())))
