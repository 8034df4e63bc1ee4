"""Pipeline plans on one mesh of a group of devices, made of the points found on it.

The points of a search on the mesh of one group decide everything but the
stages. A stage takes the point that is fastest within the memory that is left
to it; where two points meet, what crosses is priced as any other value, and
what does not fit together is left out. What is found is priced anew from
scratch: by the order of the schedule, and by the memory of its worst stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from shardwright.cost.memory import state_tensors
from shardwright.cost.pipelines import StageTime, in_flight, step_seconds
from shardwright.cost.topology import links
from shardwright.ir.layout import Bytes, Mesh
from shardwright.ir.pipeline import ASYNC, AXIS
from shardwright.search.cuts import Cuts
from shardwright.search.partition import partition
from shardwright.search.pricing import PriceList
from shardwright.search.problem import Assignment, Ints, Point
from shardwright.search.stage_costs import Homes, StageCosts
from shardwright.search.writer import PlanWriter

_POINTS = 12  # of those found on a mesh
_LIMITS = 10  # of memory
_ENDLESS = 10**6  # mini-batches that follow each other
_NARROWER = 0.85  # from one limit to the next


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline plan: `point.choice` decides everything, `cuts` are numbers of operators."""

    point: Point  # seconds of a step, bytes that add up on the worst stage
    peak: Bytes
    cuts: tuple[int, ...]
    schedule: str
    mesh: Mesh


@final
class Pipelines:
    """Pipelines of `groups` stages over the points of `writer`'s space, some of them are enough."""

    def __init__(
        self,
        writer: PlanWriter,
        cuts: Cuts,
        points: Sequence[Point],
        groups: int,
        weights: str = "",
    ) -> None:
        self.writer = writer
        self.cuts = cuts
        self.groups = groups
        model = writer.space.model
        self.mesh = Mesh(((AXIS, groups), *model.mesh.axes))
        self.link = links(model.machine, self.mesh)[0]
        self.micro_batches = model.micro_batches
        self.schedule = "1F1B" if self.micro_batches >= groups else "GPipe"
        if weights:
            self.schedule = ASYNC + weights
        # Without a flush only the slowest stage counts, and of equals the sum.
        self.rounds = _ENDLESS if weights else self.micro_batches
        # Of the weights beside one copy: predicted ones while a pass runs.
        self.copies = 1 / (2 + state_tensors(writer.optimizer)) if weights else 0.0
        self.prices = PriceList.of(writer.space.folded)
        self.homes = Homes.of(writer)
        every = np.linspace(0, len(points) - 1, min(_POINTS, len(points))).round().astype(int)
        self.points: Ints = np.array([points[i].choice for i in np.unique(every)], np.int64)
        self.places = cuts.places(groups)

    def staged(self) -> Iterator[Staged]:
        """The fastest pipeline that is found within each of some limits of memory."""
        if len(self.places) <= self.groups or not len(self.points):
            return
        costs = self._costs(self.points, self.places)
        seconds = np.where(self.cuts.trains(self.places), costs.seconds(), np.inf)
        held = [
            costs.bytes(waiting) + self._weights(costs, s)
            for s, waiting in enumerate(self._waiting)
        ]
        limit = float("inf")
        for _ in range(_LIMITS):
            fits = [np.where(bytes_ <= limit, seconds, np.inf) for bytes_ in held]
            chosen = np.stack([times.argmin(axis=0) for times in fits])
            best = np.stack([times.min(axis=0) for times in fits])
            cuts = partition(best, self.rounds)
            if cuts is None:
                return
            ends = (0, *cuts, len(self.places) - 1)
            spans = list(zip(range(self.groups), ends, ends[1:], strict=False))
            picked = [int(chosen[s, a, b]) for s, a, b in spans]
            found = self._joined([int(self.places[cut]) for cut in cuts], picked)
            if found is not None:
                yield found
            worst = max(int(held[s][k, a, b]) for (s, a, b), k in zip(spans, picked, strict=True))
            limit = min(worst - 1, _NARROWER * limit if np.isfinite(limit) else _NARROWER * worst)

    def even(self, assignment: Assignment) -> Staged | None:
        """Stages of about equal time, all of which do what `assignment` says."""
        if len(self.places) <= self.groups:
            return None
        points = np.array([assignment], np.int64)
        times = np.where(self.cuts.trains(self.places), self._costs(points, self.places).seconds()[0], np.inf)
        cuts = partition(np.stack([times] * self.groups), self.micro_batches)
        if cuts is None:
            return None
        return self.priced(assignment, [int(self.places[cut]) for cut in cuts])

    def priced(self, assignment: Assignment, cuts: Sequence[int]) -> Staged | None:
        """One pipeline, from scratch; None if its parts do not fit together."""
        ends = np.array([0, *cuts, len(self.writer.graph.ops)], np.int64)
        costs = self._costs(np.array([assignment], np.int64), ends)
        if not costs.feasible.all():
            return None
        times = [
            StageTime(
                float(costs.passes[0, s + 1] - costs.passes[0, s]) / self.micro_batches,
                float(costs.once[0, s + 1] - costs.once[0, s]),
                float(costs.way[0, s]) / 2,
            )
            for s in range(self.groups)
        ]
        held = [
            int((costs.bytes(waiting) + self._weights(costs, s))[0, s, s + 1])
            for s, waiting in enumerate(self._waiting)
        ]
        seconds = step_seconds(self.schedule, times, self.micro_batches)
        (beside,) = self.writer.peaks([Point(0.0, 0, assignment)])
        point = Point(seconds, max(held), assignment)
        peak = Bytes(point.memory + beside)
        return Staged(point, peak, tuple(cuts), self.schedule, self.mesh)

    def _weights(self, costs: StageCosts, stage: int) -> Ints:
        """Bytes of predicted weights; the last stage predicts none."""
        part = self.copies if stage < self.groups - 1 else 0.0
        state = costs.state[:, None, :] - costs.state[:, :, None]
        found: Ints = np.ceil(part * state).astype(np.int64)
        return found

    @property
    def _waiting(self) -> list[int]:
        count, pieces = self.groups, self.micro_batches
        return [in_flight(self.schedule, s, count, pieces) for s in range(count)]

    def _costs(self, points: Ints, places: Ints) -> StageCosts:
        return StageCosts(
            self.writer, self.prices, self.homes, points, self.cuts, places, self.link
        )

    def _joined(self, cuts: list[int], picked: list[int]) -> Staged | None:
        """Every stage with its own point, or all with the one that most of them have."""
        stage = np.searchsorted(np.array(cuts), self.homes.choice, "right")
        mixed = self.points[np.array(picked)[stage], np.arange(self.points.shape[1])]
        found = self.priced(tuple(mixed.tolist()), cuts)
        if found is None:
            common = max(picked, key=picked.count)
            found = self.priced(tuple(self.points[common].tolist()), cuts)
        return found
