"""Pipeline plans on one mesh of a group of devices, made of the points found on it.

The points of a search on the mesh of one group decide everything but the
stages. A stage takes the point that is fastest within the memory that is left
to it; where two points meet, what crosses is priced as any other value, and
what does not fit together is left out. What is found is priced anew from
scratch: by the order of the schedule, and by the memory of its worst group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from shardwright.cost.memory import state_tensors
from shardwright.cost.passes import waiting
from shardwright.cost.pipelines import StageTime, step_seconds
from shardwright.cost.topology import links
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.pipeline import ASYNC, AXIS, homes_of
from shardwright.lower.stages import split, splits_backward
from shardwright.search.cuts import Cuts
from shardwright.search.partition import Intervals, partition, slowest_at_least
from shardwright.search.pricing import PriceList
from shardwright.search.problem import Assignment, Floats, Ints, Point
from shardwright.search.stage_costs import Homes, StageCosts
from shardwright.search.writer import PlanWriter

# Schedules beside 1F1B and GPipe that are tried, and how many stages they give a group.
OTHERS = (
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 1),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", 2),
)

_POINTS = 12  # of those found on a mesh
_LIMITS = 10  # of memory
_SLOWER = 4.0  # than what is fastest, pipelines are looked for at most
_ENDLESS = 10**6  # mini-batches that follow each other
_NARROWER = 0.85  # from one limit to the next

# Seconds, bytes that add up and choices; cuts; seconds into every stage but the first.
_Priced = tuple[Point, Sequence[int], tuple[Seconds, ...]]


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline plan: `point.choice` decides everything, `cuts` are numbers of operators."""

    point: Point  # seconds of a step, bytes that add up on the worst group
    peak: Bytes
    cuts: tuple[int, ...]
    schedule: str
    mesh: Mesh
    ways: tuple[Seconds, ...]  # into every stage but the first, of one micro-batch


def schedule_of(groups: int, micro_batches: int) -> str:
    """Of a stage for each group: all take as long, and 1F1B keeps less where it can be run."""
    return "1F1B" if micro_batches >= groups else "GPipe"


@final
class Pipelines:
    """Pipelines of `groups`, `each` with some stages, over points of `writer`'s space.

    Some of the points are enough.
    """

    def __init__(
        self,
        writer: PlanWriter,
        cuts: Cuts,
        points: Sequence[Point],
        groups: int,
        schedule: str,
        each: int = 1,
    ) -> None:
        self.writer = writer
        self.cuts = cuts
        self.groups, self.each, self.stages = groups, each, groups * each
        model = writer.space.model
        self.mesh = Mesh(((AXIS, groups), *model.mesh.axes))
        self.link = links(model.machine, self.mesh)[0]
        self.micro_batches = model.micro_batches
        self.schedule = schedule
        # Without a flush only the slowest stage counts, and of equals the sum.
        self.rounds = _ENDLESS if schedule.startswith(ASYNC) else self.micro_batches * each
        self.homes_of_stages = np.array(homes_of(schedule, groups, self.stages), np.int64)
        # Of the weights beside one copy: predicted ones while a pass runs.
        self.copies = 0.0
        if schedule.startswith(ASYNC):
            self.copies = 1 / (2 + state_tensors(writer.optimizer))
        self.prices = PriceList.of(writer.space.folded)
        self.homes = Homes.of(writer)
        every = np.linspace(0, len(points) - 1, min(_POINTS, len(points))).round().astype(int)
        self.points: Ints = np.array([points[i].choice for i in np.unique(every)], np.int64)
        self.places = cuts.places(self.stages)

    def staged(self) -> list[Staged]:
        """The fastest pipeline that is found within each of some limits of memory."""
        return self._staged(list(self._fastest()))

    def _fastest(self) -> Iterator[_Priced]:
        if len(self.places) <= self.stages or not len(self.points):
            return
        costs = self._costs(self.points, self.places)
        every = np.where(self.cuts.trains(self.places), costs.seconds(), np.inf)
        intervals = self._worth(every.min(axis=0))
        at = np.s_[:, intervals.begin, intervals.end]
        seconds, once = every[at], costs.bytes(0)[at]
        each = costs.bytes(1)[at] - once
        predicted = once + self._weights(costs)[at]  # the last stage predicts no weights
        least = [predicted] * (self.stages - 1) + [once]
        # Stages that share a group get equal parts of its memory here; then all is priced anew.
        held = self.each * np.stack(
            [kept + most * each for kept, most in zip(least, self._most_waiting, strict=True)]
        )  # (stages, points, intervals)
        limit = float("inf")
        for _ in range(_LIMITS):
            fits = np.where(held <= limit, seconds, np.inf)
            stages = partition(fits.min(axis=1), intervals, self.rounds)
            if stages is None:
                return
            picked = [int(fits[s, :, i].argmin()) for s, i in enumerate(stages)]
            cuts = self.places[intervals.begin[stages[1:]]].tolist()
            found = self._joined(cuts, picked)
            if found is not None:
                yield found
            worst = int(held[np.arange(self.stages), picked, stages].max())
            limit = min(worst - 1, _NARROWER * limit if np.isfinite(limit) else _NARROWER * worst)

    def _worth(self, seconds: Floats) -> Intervals:
        """The intervals that are worth a look, by their least seconds (C, C).

        A pipeline takes at least as long as its slowest stage, so what takes longer than a whole
        pipeline is of use only in one that is slower, for want of memory.
        """
        every = Intervals.of(np.isfinite(seconds))
        times = seconds[every.begin, every.end]
        slowest = slowest_at_least(np.stack([times] * self.stages), every)
        whole = slowest * (self.rounds - 1 + self.stages) / self.rounds
        return Intervals.of(np.isfinite(seconds) & (seconds <= _SLOWER * whole))

    def even(self, assignment: Assignment) -> Staged | None:
        """Stages of about equal time, all of which do what `assignment` says."""
        if len(self.places) <= self.stages:
            return None
        points = np.array([assignment], np.int64)
        may = self.cuts.trains(self.places)
        intervals = Intervals.of(may)
        times = self._costs(points, self.places).seconds()[0, intervals.begin, intervals.end]
        stages = partition(np.stack([times] * self.stages), intervals, self.micro_batches)
        if stages is None:
            return None
        return self.priced(assignment, self.places[intervals.begin[stages[1:]]].tolist())

    def priced(self, assignment: Assignment, cuts: Sequence[int]) -> Staged | None:
        """One pipeline, from scratch; None if its parts do not fit together."""
        found = self._priced(assignment, cuts)
        return self._staged([found])[0] if found else None

    def _staged(self, found: Sequence[_Priced]) -> list[Staged]:
        peaks = self.writer.peaks([point for point, _, _ in found])
        return [
            Staged(point, peak, tuple(cuts), self.schedule, self.mesh, ways)
            for (point, cuts, ways), peak in zip(found, peaks, strict=True)
        ]

    def _priced(self, assignment: Assignment, cuts: Sequence[int]) -> _Priced | None:
        ends = np.array([0, *cuts, len(self.writer.graph.ops)], np.int64)
        costs = self._costs(np.array([assignment], np.int64), ends)
        if not costs.feasible.all():
            return None
        homes = self.homes_of_stages
        moved = np.diff(homes, prepend=-1) != 0  # a group hands nothing to itself
        times = [
            StageTime(
                float(costs.passes[0, s + 1] - costs.passes[0, s]) / self.micro_batches,
                float(costs.once[0, s + 1] - costs.once[0, s]),
                float(costs.way[0, s]) / 2 * bool(moved[s]),
                splits,
            )
            for s, splits in enumerate(self._splits(cuts))
        ]
        begin = np.arange(self.stages)
        none, one = (costs.bytes(count)[0, begin, begin + 1] for count in (0, 1))
        weights = self._weights(costs)[0, begin, begin + 1]
        weights[-1] = 0  # the last stage predicts none
        kept = np.bincount(homes, none + weights, self.groups)
        held = [
            int(kept[group] + (moments @ (one - none)).max())
            for group, moments in enumerate(self._waiting)
        ]
        seconds = step_seconds(self.schedule, times, self.micro_batches, self.groups)
        ways = tuple(Seconds(time.receives) for time in times[1:])
        return Point(seconds, max(held), assignment), cuts, ways

    def _splits(self, cuts: Sequence[int]) -> list[bool]:
        """Of every stage, whether its backward passes come in halves."""
        if "ZeroBubble" not in self.schedule:
            return [False] * self.stages
        return [splits_backward(part) for part in split(self.writer.graph, cuts, copies=True)]

    def _weights(self, costs: StageCosts) -> Ints:
        """Bytes of predicted weights of every interval: (P, C, C)."""
        state = costs.state[:, None, :] - costs.state[:, :, None]
        found: Ints = np.ceil(self.copies * state).astype(np.int64)
        return found

    @property
    def _waiting(self) -> tuple[Ints, ...]:
        """Micro-batches that wait in each stage of a group, at some moments: (moments, stages)."""
        pieces = self.stages if self.schedule.startswith(ASYNC) else self.micro_batches
        return waiting(self.schedule, self.groups, self.stages, pieces)

    @property
    def _most_waiting(self) -> list[int]:
        """Of every stage."""
        most = np.max([moments.max(axis=0) for moments in self._waiting], axis=0)
        return [int(count) for count in most]

    def _costs(self, points: Ints, places: Ints) -> StageCosts:
        return StageCosts(
            self.writer, self.prices, self.homes, points, self.cuts, places, self.link
        )

    def _joined(self, cuts: list[int], picked: list[int]) -> _Priced | None:
        """Every stage with its own point, or all with the one that most of them have."""
        stage = np.searchsorted(np.array(cuts), self.homes.choice, "right")
        mixed = self.points[np.array(picked)[stage], np.arange(self.points.shape[1])]
        found = self._priced(tuple(mixed.tolist()), cuts)
        if found is None:
            common = max(picked, key=picked.count)
            found = self._priced(tuple(self.points[common].tolist()), cuts)
        return found
