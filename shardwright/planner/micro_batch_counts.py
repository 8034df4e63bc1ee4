"""Selects candidate numbers of micro-batches.

Like the mesh, the number is a choice of the outer loop: each number has a search of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar, final

from shardwright.ir.frontier import Frontier, costs_of
from shardwright.ir.graph import Graph
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.rules.analysis import Analysis
from shardwright.rules.micro_batches import (
    MicroBatchError,
    MicroBatches,
    batch_size,
    micro_batches,
    with_count,
)
from shardwright.rules.micro_graph import micro_graph

F = TypeVar("F", bound=Frontier, covariant=True)

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


class Search(Protocol[F]):
    """A search that tries micro-batches and chunks of the loss only if memory is tight.

    It tries the first `ways` to keep state of the optimizer on the host, too.
    """

    def __call__(self, *, tight: bool, ways: int = 0) -> F:
        """The frontier that it finds."""


def if_needed(
    run: Search[SearchedFrontier],
    found: SearchedFrontier,
    limit: str | int | None,
    ways: range,
) -> SearchedFrontier:
    """`found`, or a frontier with more on the host if nothing fits else.

    Copies from the host take longer than an update on the device in any case. `ways` are numbers of
    ways to keep state of the optimizer there that may be tried besides, in their order.
    """
    most = found.limit(limit)
    for number in ways:
        if most is None:
            break
        every = found.plans, found.baselines, found.pipelines
        least = min((peak for plans in every for _, peak in costs_of(plans)), default=math.inf)
        if least <= most or found.simulated_peak(found[-1]) <= most:
            break
        more = run(tight=True, ways=number)
        found = replace(more, search_seconds=found.search_seconds + more.search_seconds)
    return found


def if_tight(run: Search[F], limit: str | int | None = None) -> F:
    """The frontier that `run` finds, with what only saves memory if `limit` requires it.

    Micro-batches and chunks of the loss save memory and never make a step faster. So they are tried
    only if none of the plans that are about as fast as the fastest fits. To decide this, the plan
    of least memory among them is simulated. `limit` is as in `Frontier.fastest`.
    """
    plain = run(tight=False)
    most = plain.limit(limit)
    smallest = plain.good - 1
    if most is None or plain.costs[smallest][1] <= most:
        return plain
    if plain.simulated_peak(plain[smallest]) <= most:
        return plain
    more = run(tight=True)
    return replace(more, search_seconds=plain.search_seconds + more.search_seconds)
