"""A relaxation of Checkmate's program that grows until its optimum is a schedule that fits.

Memory counts at the end of a few stages, the *cuts*, while the node of the stage runs: its
operands, its result and everything that the next stage begins with are there. Of the stages between
two cuts only their union counts: a node that runs in several of them pays once. What the forward
pass has made is there when the backward pass begins, as far as it fits then. Every schedule of
Checkmate within the limit satisfies this, so the optimum is a lower bound of Checkmate's.

The schedule that a solution describes runs every node as late as it may. Where it exceeds the
limit, its stages become cuts, and the relaxation is solved again. If it fits, it is Checkmate's
optimum, because it takes no longer than the bound.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.checkmate.rows import Floats, Program
from benchmarks.checkmate.schedule import Schedule, schedule_of
from benchmarks.checkmate.training_graph import TrainingGraph


@dataclass(frozen=True)
class Optimum:
    """Checkmate's optimum within a limit, or what is known of it.

    Attributes:
        bound: at most the seconds of every schedule that fits; infinite if none does.
        schedule: a schedule that fits and takes `bound` seconds; None if there is none, or if none
            was found.
        cuts: the stages at which memory counted.
        rounds: how many programs were solved.
    """

    bound: float
    schedule: Schedule | None
    cuts: tuple[int, ...]
    rounds: int


def optimum(graph: TrainingGraph, limit: int, seconds: float) -> Optimum:
    """Checkmate's optimum within `limit` bytes, or a bound after about `seconds` seconds."""
    end, bound, rounds = time.monotonic() + seconds, graph.least_seconds, 0
    cuts: set[int] = {graph.forward - 1}
    while True:
        rounds += 1
        relaxation = Relaxation(graph, limit, cuts)
        found = relaxation.program.solved(max(1.0, end - time.monotonic()))
        bound = max(bound, relaxation.seconds(found.bound))
        if found.values is None:
            return Optimum(bound, None, tuple(sorted(cuts)), rounds)
        made = relaxation.schedule(found.values)
        over = {t for t, peak in enumerate(made.stage_peaks()) if peak > limit}
        if not over and found.proven:
            return Optimum(bound, made, tuple(sorted(cuts)), rounds)
        new = {t for t in over if t >= graph.forward} - cuts
        if not new or time.monotonic() > end:
            return Optimum(bound, None, tuple(sorted(cuts)), rounds)
        cuts |= new


@final
class Relaxation:
    """The relaxation within `limit` bytes at the stages `cuts`.

    `cuts` has the last stage of the forward pass, and none before it.
    """

    def __init__(self, graph: TrainingGraph, limit: int, cuts: Collection[int]) -> None:
        self.graph, self.cuts, self.program = graph, sorted(cuts), Program()
        self.ends = [*self.cuts[1:], len(graph) - 1]  # the last stages of the stretches
        self.unit = graph.least_seconds  # of time in the program
        made = [graph.forward, *(end + 1 for end in self.ends[:-1])]
        # The variables of all nodes: those held after each cut, and those that run in a stretch.
        self.held = [self.program.variables([0.0] * count, whole=True) for count in made]
        costs = [second / self.unit for second in graph.seconds]
        self.runs = [self.program.variables(costs[: end + 1], whole=False) for end in self.ends]
        for stretch in range(len(self.ends)):
            self._add_stretch(stretch)
        for cut, held in zip(self.cuts, self.held, strict=True):
            self._add_limit(cut, held, limit)

    def _add_stretch(self, stretch: int) -> None:
        """What runs in a stretch has what it reads; what is held after it was there, or runs."""
        before, runs = self.held[stretch], self.runs[stretch]

        def available(node: int) -> list[tuple[int, float]]:
            return [(of[node], -1.0) for of in (before, runs) if node < len(of)]

        for node, run in enumerate(runs):
            for read in self.graph.reads[node]:
                self.program.row([(run, 1.0), *available(read)], 0.0)
            if node > self.cuts[stretch]:
                self.program.require(run)
        if stretch + 1 < len(self.held):
            for node, after in enumerate(self.held[stretch + 1]):
                self.program.row([(after, 1.0), *available(node)], 0.0)

    def _add_limit(self, cut: int, held: Iterable[int], limit: int) -> None:
        graph, there = self.graph, {cut, *self.graph.reads[cut]}
        fixed = sum(graph.bytes[i] for i in there) + graph.workspace[cut]
        unit = max(graph.bytes)
        terms = [(v, graph.bytes[i] / unit) for i, v in enumerate(held) if i not in there]
        self.program.row(terms, (limit - fixed) / unit)

    def seconds(self, cost: float) -> float:
        """Seconds of a step from a cost of the program, in which the forward pass is left out."""
        return sum(self.graph.seconds[: self.graph.forward]) + cost * self.unit

    def schedule(self, values: Floats) -> Schedule:
        """The schedule that a solution describes; everything runs as late as it may."""
        graph, runs = self.graph, np.eye(len(self.graph), dtype=bool)
        kept = [{i for i, v in enumerate(held) if values[v] > 0.5} for held in self.held]
        for stretch, end in enumerate(self.ends):
            have, after = set(kept[stretch]), [*kept, set[int]()][stretch + 1]
            for stage in range(self.cuts[stretch] + 1, end + 1):
                wanted = [*graph.reads[stage], *(after if stage == end else ())]
                while wanted:
                    node = wanted.pop()
                    if node not in have and node != stage:
                        have.add(node)
                        runs[stage, node] = True
                        wanted += graph.reads[node]
                have.add(stage)
        return schedule_of(graph, runs)
