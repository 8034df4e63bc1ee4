"""Pipeline plans on one mesh of a group of devices, built from the points found on it.

A point of the search on the mesh of one group decides everything except the stages. Each stage
takes the fastest point within its memory limit. A value that crosses from a stage to one with
another point is redistributed and priced like any other; combinations without such a redistribution
are dropped. Each pipeline found is priced again from scratch, from the order of its schedule and
the memory of the group that needs most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, final

import numpy as np

from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.memory import Memory
from shardwright.ir.options.optimizers import optimizer_spec
from shardwright.ir.pipeline import AXIS, StageRanks, whole_mesh
from shardwright.ir.schedules.registry import schedule_named
from shardwright.ir.schedules.single_stage import GPIPE, ONE_F_ONE_B
from shardwright.machine.topology import links
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.pipeline.partition import Intervals, objective, partition, slowest_at_least
from shardwright.planner.pipeline.stage_costs import Offer, RunningCosts, StageCosts
from shardwright.planner.pipeline.stage_memory import stage_memory
from shardwright.planner.tables.memory import fixed_bytes
from shardwright.simulate.time.pipeline_schedules import waiting
from shardwright.simulate.time.pipelines import StageTime, steps_seconds
from shardwright.solve.elimination.problem import Assignment, Floats, Ints, Point

_LIMITS = 14  # the number of memory limits that are tried
_SLOWER = (1.0, 2.0, 4.0)  # search up to these multiples of the seconds of the fastest pipeline
_ENDLESS = 10**6  # stands for any number of mini-batches without a flush
_NARROWER = 0.85  # ratio of one memory limit to the one before

# Seconds, bytes that add up and choices; cuts; seconds into every stage but the first.
_Priced = tuple[Point, Sequence[int], tuple[Seconds, ...]]
_Picked = tuple[Sequence[int], Sequence[int]]  # cuts, and the index of each stage's point


class Gain(NamedTuple):
    """The result of a search for pipelines: the number of new plans, and seconds of the fastest.

    If a plan exceeds the memory of a device, its seconds are multiplied by the ratio of both.
    """

    new: int
    seconds: float


NOTHING = Gain(0, math.inf)


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline plan: `point.choice` decides everything, `cuts` are indices of operators."""

    point: Point  # seconds of a step, bytes that add up on the worst group
    peak: Bytes
    cuts: tuple[int, ...]
    schedule: str
    mesh: Mesh
    receive_seconds: tuple[Seconds, ...]  # into every stage but the first, of one micro-batch


def schedule_of(groups: int, micro_batches: int) -> str:
    """1F1B, or GPipe if 1F1B cannot run: both take equally long, and 1F1B needs less memory."""
    runs = not ONE_F_ONE_B.needs(groups, groups, micro_batches)
    return (ONE_F_ONE_B if runs else GPIPE).name


@final
class Pipelines:
    """Finds pipelines of `groups`, `each` with some stages, over the points of `offer`."""

    def __init__(
        self, offer: Offer, cuts: StageCuts, groups: int, schedule: str, each: int = 1
    ) -> None:
        self.offer = offer
        self.writer = writer = offer.writer
        self.cuts = cuts
        self.groups, self.each, self.stages = groups, each, groups * each
        model = writer.space.model
        self.mesh, self.ranks = whole_mesh(model.mesh, groups), StageRanks.of(model.mesh, groups)
        self.link = links(model.machine, self.mesh)[self.mesh.names.index(AXIS)]
        self.micro_batches = model.micro_batches
        self.schedule, self.spec = schedule, schedule_named(schedule)
        # Without a flush only the slowest stage determines the time; the sum breaks ties.
        self.rounds = _ENDLESS if self.spec.asynchronous else self.micro_batches * each
        self.group_of_stage = np.array(self.spec.homes(groups, self.stages), np.int64)
        # Predicted weights, as a fraction of the state; they are in memory while a pass runs.
        self.copies = 0.0
        if self.spec.asynchronous:
            self.copies = 1 / (2 + optimizer_spec(writer.optimizer).state_tensors)
        self.points = offer.points
        self.positions = cuts.positions(self.stages)

    def staged(self) -> list[Staged]:
        """The fastest pipeline found within each of several memory limits."""
        return self._staged([found for found in self._combined(list(self._fastest())) if found])

    def _fastest(self) -> Iterator[_Picked]:
        """The cuts and the index of each stage's point, for each memory limit."""
        if len(self.positions) <= self.stages or not len(self.points):
            return
        costs = self._costs(self.offer.running, self.positions)
        every = np.where(self.cuts.trains(self.positions), costs.seconds(), np.inf)
        widening = self._widening_intervals(every)
        search = self._search_within(costs, every, *next(widening))
        limit = float("inf")
        for _ in range(_LIMITS):
            while (found := search.fastest(limit)) is None:
                wider = next(widening, None)
                if wider is None:
                    return
                search = self._search_within(costs, every, *wider)
            stages, picked, worst = found
            yield self.positions[search.intervals.begin[stages[1:]]].tolist(), picked
            limit = min(worst - 1, _NARROWER * limit if np.isfinite(limit) else _NARROWER * worst)

    def _search_within(
        self, costs: StageCosts, every: Floats, intervals: Intervals, slowest: Seconds
    ) -> _IntervalSearch:
        """The search among pipelines of `intervals`, complete up to `slowest` seconds."""
        at = np.s_[:, intervals.begin, intervals.end]
        once = costs.bytes(0)[at]
        each = costs.bytes(1)[at] - once
        predicted = once + self._weights(costs)[at]  # the last stage predicts no weights
        least = [predicted] * (self.stages - 1) + [once]
        # Stages of one group get equal parts of its memory; the result is priced again.
        kinds = [(s == self.stages - 1, most) for s, most in enumerate(self._most_waiting)]
        distinct = list(dict.fromkeys(kinds))
        stage_bytes = self.each * np.stack([least[-last] + most * each for last, most in distinct])
        kind = np.array([distinct.index(one) for one in kinds])
        return _IntervalSearch(intervals, self.rounds, slowest, every[at], stage_bytes, kind)

    def even(self, assignment: Assignment) -> Staged | None:
        """A pipeline of stages of about equal time under `assignment`; None if there is none."""
        cuts = self.even_cuts(assignment)
        return None if cuts is None else self.priced(assignment, cuts)

    def even_cuts(self, assignment: Assignment) -> Sequence[int] | None:
        """The cuts of that pipeline."""
        if len(self.positions) <= self.stages:
            return None
        running = self.offer.running_of(np.array([assignment], np.int64))
        intervals = Intervals.of(self.cuts.trains(self.positions))
        seconds = self._costs(running, self.positions).seconds()
        times = seconds[0, intervals.begin, intervals.end]
        costs = np.broadcast_to(times, (self.stages, len(times)))
        stages = partition(costs, intervals, self.micro_batches)
        if stages is None:
            return None
        cuts: list[int] = self.positions[intervals.begin[stages[1:]]].tolist()
        return cuts

    def priced(self, assignment: Assignment, cuts: Sequence[int]) -> Staged | None:
        """One pipeline, priced from scratch; None if its stages do not fit together."""
        (found,) = self._priced(np.array([assignment], np.int64), [cuts])
        return self._staged([found])[0] if found else None

    def _staged(self, found: Sequence[_Priced]) -> list[Staged]:
        peaks = self.writer.peaks([point for point, _, _ in found])
        return [
            Staged(point, peak, tuple(cuts), self.schedule, self.mesh, receive_seconds)
            for (point, cuts, receive_seconds), peak in zip(found, peaks, strict=True)
        ]

    def _priced(
        self, assignments: Ints, every_cuts: Sequence[Sequence[int]]
    ) -> list[_Priced | None]:
        """Price pipelines from scratch: assignments (P, nodes), each with its cuts."""
        found: list[_Priced | None] = [None] * len(assignments)
        if not found:
            return found
        ends = np.array([[0, *cuts, len(self.writer.graph.ops)] for cuts in every_cuts], np.int64)
        costs = self._costs(self.offer.running_of(assignments), ends)
        groups, stage_bytes = self.group_of_stage, self._stage_bytes(costs)
        moved = np.diff(groups, prepend=-1) != 0  # a group sends nothing to itself
        rows = np.flatnonzero(costs.feasible).tolist()
        times = [
            [
                StageTime(
                    float(costs.passes[row, s + 1] - costs.passes[row, s]) / self.micro_batches,
                    float(costs.once[row, s + 1] - costs.once[row, s]),
                    float(costs.crossing_seconds[row, s]) / 2 * bool(moved[s]),
                    splits,
                )
                for s, splits in enumerate(self._splits(every_cuts[row]))
            ]
            for row in rows
        ]
        every_seconds = steps_seconds(self.schedule, times, self.micro_batches, self.groups)
        for row, seconds, stages in zip(rows, every_seconds, times, strict=True):
            most, _, _ = stage_bytes.worst(row, groups, self._waiting)
            point = Point(seconds, most, tuple(assignments[row].tolist()))
            receive_seconds = tuple(Seconds(stage.receives) for stage in stages[1:])
            found[row] = point, every_cuts[row], receive_seconds
        return found

    def memory(self, staged: Staged) -> Memory:
        """The memory of the worst group at its peak; its total is `staged.peak`."""
        choice = np.array([staged.point.choice], np.int64)
        ends = np.array([[0, *staged.cuts, len(self.writer.graph.ops)]], np.int64)
        costs = self._costs(self.offer.running_of(choice), ends)
        stage_bytes, groups = self._stage_bytes(costs), self.group_of_stage
        most, group, moment = stage_bytes.worst(0, groups, self._waiting)
        waiting = {s: int(moment[s]) for s in np.flatnonzero(groups == group).tolist()}
        weights = sum(int(stage_bytes.weights[0, stage]) for stage in waiting)
        transient = staged.peak - fixed_bytes(self.writer.graph) - most
        return stage_memory(costs, waiting, weights, transient, self.ranks.rank(group, 0))

    def _stage_bytes(self, costs: StageCosts) -> _StageBytes:
        begin = np.arange(self.stages)
        none, one = (costs.bytes(count)[:, begin, begin + 1] for count in (0, 1))
        weights = self._weights(costs)[:, begin, begin + 1]
        weights[:, -1] = 0  # the last stage predicts none
        return _StageBytes(none, one - none, weights)

    def _splits(self, cuts: Sequence[int]) -> list[bool]:
        """For every stage, whether its backward passes are split."""
        if not self.spec.splits_backward:
            return [False] * self.stages
        ends = (0, *cuts, len(self.writer.graph.ops))
        return [self.cuts.splits(begin, end) for begin, end in pairwise(ends)]

    def _weights(self, costs: StageCosts) -> Ints:
        """Bytes of predicted weights of every interval: (P, C, C)."""
        state = costs.state[:, None, :] - costs.state[:, :, None]
        found: Ints = np.ceil(self.copies * state).astype(np.int64)
        return found

    @property
    def _waiting(self) -> tuple[Ints, ...]:
        """For each group, micro-batches in flight in its stages over time: (moments, stages)."""
        passes = self.stages if self.spec.asynchronous else self.micro_batches
        return waiting(self.schedule, self.groups, self.stages, passes)

    @property
    def _most_waiting(self) -> list[int]:
        """The most micro-batches in flight in every stage."""
        most = np.max([moments.max(axis=0) for moments in self._waiting], axis=0)
        return [int(count) for count in most]

    def _costs(self, running: RunningCosts, positions: Ints) -> StageCosts:
        return StageCosts(running, self.cuts, positions, self.link)

    def _combined(self, every: Sequence[_Picked]) -> list[_Priced | None]:
        """Pipelines in which every stage has its own point, or all have the most frequent point."""
        if not every:
            return []
        nodes = np.arange(self.points.shape[1])
        mixed = np.array([self.points[self._point_of(*one), nodes] for one in every], np.int64)
        found = self._priced(mixed, [cuts for cuts, _ in every])
        again = [i for i, one in enumerate(found) if one is None]
        common = [max(every[i][1], key=every[i][1].count) for i in again]
        others = self._priced(self.points[common], [every[i][0] for i in again])
        for i, one in zip(again, others, strict=True):
            found[i] = one
        return found

    def _point_of(self, cuts: Sequence[int], picked: Sequence[int]) -> Ints:
        """For every node the index of the point that decides it."""
        found: Ints = np.array(picked)[np.searchsorted(cuts, self.offer.owners.choice, "right")]
        return found

    def _widening_intervals(self, every: Floats) -> Iterator[tuple[Intervals, Seconds]]:
        """Growing sets of intervals, each with the seconds up to which it is complete.

        A set contains the stages of all pipelines that take at most a multiple of the seconds of
        the fastest one, because a pipeline takes at least as long as its slowest stage. `every` are
        the seconds of intervals under each point, (P, C, C).
        """
        seconds = every.min(axis=0)
        intervals = Intervals.of(np.isfinite(seconds))
        times = seconds[intervals.begin, intervals.end]
        slowest = slowest_at_least(np.stack([times] * self.stages), intervals)
        whole = slowest * (self.rounds - 1 + self.stages) / self.rounds
        for slower in _SLOWER:
            most = slower * whole
            last = slower == _SLOWER[-1]
            search = Intervals.of(np.isfinite(seconds) & (seconds <= most))
            yield search, Seconds(np.inf if last else most)


@final
@dataclass(frozen=True, eq=False)
class _StageBytes:
    """Additive bytes of every stage of pipelines, (P, stages) each.

    Attributes:
        once: bytes that do not depend on the micro-batches in flight.
        each: bytes of each micro-batch in flight.
        weights: bytes of predicted weights.
    """

    once: Ints
    each: Ints
    weights: Ints

    def worst(self, row: int, groups: Ints, waiting: Sequence[Ints]) -> tuple[int, int, Ints]:
        """Bytes of the group that needs most, its index, and its micro-batches in flight then.

        `groups` are the groups of the stages, `waiting` as `pipeline_schedules.waiting` gives it.
        """
        found = []
        kept = np.bincount(groups, self.once[row] + self.weights[row], len(waiting))
        for group, moments in enumerate(waiting):
            stage_bytes = moments @ self.each[row]
            at = int(stage_bytes.argmax())
            found.append((int(kept[group]) + int(stage_bytes[at]), group, moments[at]))
        return max(found, key=lambda one: one[0])


@final
@dataclass(frozen=True, eq=False)
class _IntervalSearch:
    """The search among pipelines whose stages are some of `intervals`.

    Other pipelines take more than `slowest` seconds. Under point p, interval i takes
    `seconds[p, i]`, and as stage s it needs `stage_bytes[kind[s], p, i]` bytes.
    """

    intervals: Intervals
    rounds: int
    slowest: Seconds
    seconds: Floats  # (P, I)
    stage_bytes: Ints  # (kinds of stages, P, I)
    kind: Ints  # (stages,)

    def fastest(self, limit: float) -> tuple[list[int], list[int], int] | None:
        """The fastest pipeline within `limit` bytes: each stage's interval and point, worst bytes.

        None if there is no such pipeline, or if a pipeline of other intervals may be faster.
        """
        least = np.full((self.stage_bytes.shape[0], self.stage_bytes.shape[2]), np.inf)
        for stage_bytes, seconds in zip(self.stage_bytes.swapaxes(0, 1), self.seconds, strict=True):
            np.minimum(
                least, seconds, out=least, where=stage_bytes <= limit
            )  # a point: stays in cache
        costs = least[self.kind]
        stages = partition(costs, self.intervals, self.rounds)
        if stages is None:
            return None
        every = np.arange(len(stages))
        if objective(costs[every, stages].tolist(), self.rounds) > self.slowest:
            return None
        stage_bytes = self.stage_bytes[self.kind, :, stages]
        picked = np.where(stage_bytes <= limit, self.seconds[:, stages].T, np.inf).argmin(axis=1)
        worst = int(stage_bytes[every, picked].max())
        return stages, picked.tolist(), worst
