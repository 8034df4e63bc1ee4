"""Selects candidate numbers of micro-batches.

Like the mesh, the number is a choice of the outer loop: each number has a search of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from shardwright.ir.graph import Graph
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import (
    MicroBatchError,
    MicroBatches,
    batch_size,
    micro_batches,
    with_count,
)
from shardwright.rules.micro_graph import micro_graph

_MOST = 1024  # the largest number of micro-batches that is tried by default


@final
class MicroBatchCounts:
    """The micro-batches of one graph; the dimensions to cut are found once for all counts."""

    def __init__(self, graph: Graph, analysis: Analysis) -> None:
        self.graph = graph
        self.analysis = analysis
        self._found: MicroBatches | None = None

    @property
    def batch(self) -> int:
        """Samples in the batch; 1 where the batch dimension is not known."""
        try:
            return batch_size(self.graph, self.analysis)
        except MicroBatchError:
            return 1

    def split(self, count: int) -> MicroBatches:
        """The batch cut into `count` micro-batches; raises `MicroBatchError` if that fails."""
        if self._found is None:
            self._found = micro_batches(self.graph, self.analysis, count)
        return with_count(self._found, self.graph, self.analysis, count)

    def analyzed(self, count: int) -> tuple[Graph, Analysis]:
        """The graph of one of `count` micro-batches, with its analysis."""
        if count == 1:
            return self.graph, self.analysis
        return micro_graph(self.graph, self.analysis, self.split(count))

    def possible(self, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The numbers of micro-batches that the graph supports, and why it does not support others.

        Args:
            wanted: the numbers to check; None checks all powers of two.

        Returns:
            The supported numbers, (1,) if there is none, and a note for each other one.
        """
        counts: list[int] = []
        notes: list[str] = []
        for count in sorted(set(wanted)) if wanted is not None else _powers():
            if count == 1:
                counts.append(count)
                continue
            try:
                counts.append(self.split(count).count)
            except MicroBatchError as e:
                if wanted is None:
                    if count == 2 and self.batch > 1:
                        notes.append(f"micro-batches are not possible: {e}")
                    break
                notes.append(f"{count} micro-batches are not possible: {e}")
        return tuple(counts) or (1,), tuple(notes)


def _powers() -> list[int]:
    return [2**i for i in range(_MOST.bit_length())]
