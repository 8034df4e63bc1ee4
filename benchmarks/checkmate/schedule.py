"""Schedules of a training graph in Checkmate's stages, and their seconds and bytes.

In stage t node t runs for the first time, after any earlier nodes that run again, in their order.
`runs[t, i]` says whether node i runs in stage t, `held[t, i]` whether its result is there when the
stage begins. A result is dropped after its last reader of a stage if the next stage does not begin
with it.

Paper: Jain et al. 2020 (arXiv 1910.02653), section 4. Deviation: a node that runs may
have a workspace, which counts beside its result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.checkmate.training_graph import TrainingGraph

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The matrices R and S of the paper: `runs` and `held`, both (nodes, nodes)."""

    graph: TrainingGraph
    runs: Bools
    held: Bools

    @property
    def seconds(self) -> float:
        """Seconds of all runs."""
        return float(self.runs.sum(axis=0) @ np.array(self.graph.seconds))

    def error(self) -> str:
        """The first rule of the paper that is broken; empty if none is."""
        runs, held, count = self.runs, self.held, len(self.graph)
        if not runs.diagonal().all():
            return "a stage without its node"
        if np.triu(runs, 1).any() or np.triu(held).any():
            return "a node runs, or is held, before its stage"
        if (held[1:] & ~(held[:-1] | runs[:-1])).any():
            return "a result is held that was not there"
        for t in range(count):
            for i in np.flatnonzero(runs[t]):
                if not all(runs[t, j] or held[t, j] for j in self.graph.reads[i]):
                    return f"stage {t} runs node {i} without what it reads"
        return ""

    def stage_peaks(self) -> list[int]:
        """The most bytes of every stage."""
        return [max(self.bytes_of_stage(t)) for t in range(len(self.graph))]

    @property
    def peak(self) -> int:
        """The most bytes of the step."""
        return max(self.stage_peaks())

    def bytes_of_stage(self, stage: int) -> list[int]:
        """Bytes while each node of a stage runs, in their order (the paper's U and a workspace)."""
        graph, found = self.graph, []
        after = self.held[stage + 1] if stage + 1 < len(graph) else np.zeros(len(graph), bool)
        order = np.flatnonzero(self.runs[stage]).tolist()
        last = {i: i for i in order} | {j: i for i in order for j in graph.reads[i]}
        now = sum(graph.bytes[i] for i in np.flatnonzero(self.held[stage]))
        for i in order:
            now += graph.bytes[i]
            found.append(now + graph.workspace[i])
            gone = [j for j in {i, *graph.reads[i]} if last[j] == i and not after[j]]
            now -= sum(graph.bytes[j] for j in gone)
        return found


def schedule_of(graph: TrainingGraph, runs: Bools) -> Schedule:
    """The schedule that runs these nodes, and holds results no longer than they are read."""
    held = np.zeros_like(runs)
    needed = np.zeros(len(graph), bool)  # by the stages that come
    for t in range(len(graph) - 1, -1, -1):
        for i in np.flatnonzero(runs[t]):
            needed[list(graph.reads[i])] = True
        needed &= ~runs[t]
        held[t] = needed
    return Schedule(graph, runs, held)
