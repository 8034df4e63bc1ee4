"""The main loop of a search, over meshes and numbers of micro-batches.

Each iteration yields points that may become plans, a lower bound, and baselines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import DEFAULTS, PlanOptions
from shardwright.ir.schedules.registry import schedule_named
from shardwright.machine.model import Machine
from shardwright.planner.baselines import baseline_candidates, baselines
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.pipeline.stage_assignment import NOTHING, Gain, Pipelines, schedule_of
from shardwright.planner.pipeline.stage_costs import Offer, most_updates
from shardwright.planner.plans.candidate import Candidate, is_new, may_beat, may_improve
from shardwright.planner.plans.mesh_bounds import (
    BoundByBytes,
    MeshBound,
    hides_copies,
    least_seconds,
    without_copies,
)
from shardwright.planner.plans.mesh_frontier import mesh_frontier
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.processes.meshes_ahead import MeshesAhead
from shardwright.planner.settle import most_counted, most_shared
from shardwright.planner.space.assembly import FREE, SEARCHED, SEARCHED_EXACTLY
from shardwright.planner.space.constrain import Marks
from shardwright.planner.space.peaks import Peaks
from shardwright.planner.space.space import Space
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.frontier.union import AroundStrategies
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.options import Allowed
from shardwright.simulate.time.pipelines import least_step_seconds
from shardwright.simulate.time.stragglers import skewed, stretch
from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier.sweep import DualBound

GAIN = 1e-2  # a smaller gain in time or memory does not justify more searches
_WEIGHTS_PER_PIPE = 24  # stages choose from a dozen points
_OTHER_TRAINING = (
    "asynchronous: stages update their weights after every mini-batch without waiting for each"
    " other, so between the two passes of a mini-batch stage k of N makes N - k - 1 updates for"
    " others, and passes use weights predicted for them; this does not train as one device does,"
    " see docs/how-to/async.md"
)
_NARROWED = "recomputation was not searched: with it this graph is too wide on this mesh"


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """The search of one mesh, with the notes of its plans; bounds are of additive seconds."""

    writer: PlanBuilder
    bound: Callable[[float], float]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The search result of one device group of a pipeline, from which its stages choose."""

    offer: Offer
    alone: Callable[[float], float]  # bytes -> lower bound of the seconds of all its stages
    notes: tuple[str, ...]
    most_updates: float  # seconds


class _Result(NamedTuple):
    """The points of one mesh; `refused` is a bound for which they are only those of its hull."""

    writer: PlanBuilder
    points: list[Point]
    bound: Callable[[float], float]
    notes: tuple[str, ...]
    refused: DualBound | None


@dataclass
class MeshLoop:
    """The results of a search so far, and the methods that extend them.

    `refused` has the reasons why meshes were skipped; all plans carry `notes`.
    """

    factory: SpaceFactory
    machine: Machine
    options: PlanOptions = DEFAULTS
    notes: tuple[str, ...] = ()
    found: list[Candidate] = field(default_factory=list)  # that were searched
    known: list[Candidate] = field(default_factory=list)  # baselines and uniform strategies
    refused: list[str] = field(default_factory=list)
    searched: list[Searched] = field(default_factory=list)
    fastest: dict[Mesh, Seconds] = field(default_factory=dict)  # plan on each mesh, no stages
    pipelines: list[Candidate] = field(default_factory=list)  # compared beside the frontier
    elsewhere: Sequence[tuple[Seconds, Bytes]] = ()  # costs of plans of other forms of the graph
    host: bool = False  # whether inputs of recomputed segments may wait in its memory
    bounds: list[MeshBound] = field(default_factory=list)  # by additive memory
    is_cut: bool = False  # whether its time was over before it ended
    best_start: float = math.inf  # seconds of the fastest strategy of `start_from` that fits
    made: dict[tuple[Mesh, int, bool], _Result] = field(default_factory=dict)  # without stages
    _groups: dict[tuple[Mesh, int], _Group] = field(default_factory=dict)

    @property
    def best(self) -> Seconds | None:
        """Seconds of the fastest plan so far; None before the first plan."""
        known = (*self.found, *self.permitted)
        return min((Seconds(c.point.time) for c in known), default=None)

    @property
    def best_within_limit(self) -> float:
        """Seconds of the fastest plan so far that fits the memory limit; infinite if none does."""
        known = (*self.found, *self.permitted)
        return min((c.seconds_within(self._limit) for c in known), default=math.inf)

    @property
    def _limit(self) -> float:
        """The memory limit in bytes; infinite without one."""
        limit = limit_on(self.machine, self.options.memory_limit)
        return math.inf if limit is None else limit

    @property
    def costs(self) -> list[tuple[Seconds, Bytes]]:
        """Seconds and bytes of all plans so far."""
        return [*(c.cost for c in (*self.found, *self.known)), *self.elsewhere]

    @property
    def permitted(self) -> list[Candidate]:
        """The baselines that break no constraint."""
        return [c for c in self.known if not c.broken]

    def start_from(self, candidates: Sequence[Candidate]) -> None:
        """Add plans of uniform strategies as baselines, and their costs to the lower bound."""
        self.known += candidates
        within = (one.seconds_within(self._limit) for one in candidates)
        self.best_start = min(within, default=math.inf)
        self.bounds += map(self.bound_on, candidates)

    def bound_on(self, one: Candidate) -> MeshBound:
        """The bound on the steps of one candidate."""
        if one.staged is not None and not self.machine.charges_hidden:
            return MeshBound(0, one.seconds_within)
        given = one.writer.space.model.mesh, one.writer.space.model.micro_batches
        if one.staged is None:
            return MeshBound(0, self._on_steps(one.seconds_within, *given))
        counted = most_counted(self.machine, *given)
        return MeshBound(0, lambda memory: one.seconds_within(memory) / counted)

    def knows(self, name: str) -> bool:
        """Whether there is a baseline of this name."""
        return any(c.name == name for c in self.known)

    def run(
        self,
        mesh: Mesh,
        count: int,
        seconds: float,
        *,
        compare: bool,
        decide: Callable[[CostModel], Allowed] | None = None,
        parts: bool = False,
    ) -> bool:
        """Search one mesh with `count` micro-batches.

        Args:
            mesh: the mesh of all devices.
            count: the number of micro-batches.
            seconds: the time limit.
            compare: whether to add the baselines.
            decide: the choices to search, if not all, of a mesh of this search's own.
            parts: whether parts of layers are recomputed, or whole ones.

        Returns:
            Whether a plan was found that is clearly faster or smaller than each known one, or the
            smallest of all.

        Raises:
            ConstraintError: the constraints leave an operator or parameter no choice.
        """
        costs = self.costs
        writer, points, bound, notes, _ = self._result(mesh, count, seconds, costs, decide, parts)
        narrowed = (_NARROWED,) if mesh in self.factory.too_wide else ()
        self.bounds.append(self._bound_of(writer, bound, mesh, count))
        one = Searched(writer, bound, (*self.notes, *narrowed))
        self.searched.append(one)
        new = self._add(one, points, notes)
        if points:
            best = min(Seconds(point.time) for point in points)
            self.fastest[mesh] = min(best, self.fastest.get(mesh, best))
        if compare:
            self.known += baseline_candidates(writer)
        smallest = min((peak for _, peak in costs), default=math.inf)
        return any(is_new(c.cost, costs, GAIN) or c.peak < smallest for c in new)

    def _result(
        self,
        mesh: Mesh,
        count: int,
        seconds: float,
        costs: Sequence[tuple[Seconds, Bytes]],
        decide: Callable[[CostModel], Allowed] | None,
        parts: bool,
    ) -> _Result:
        """The search of a mesh; one of all choices is made once if `costs` do not matter."""
        known = self.made.get((mesh, count, parts)) if decide is None else None
        if known is not None:
            worth = may_improve(costs, known.writer.least_overhead)
            if known.refused is None or not worth(known.refused):
                return known
        ahead = self.ahead.take((mesh, count)) if decide is None and not parts else None
        writer, frontier = ahead or (
            self.writer(self.factory, mesh, count, decide=decide, parts=parts),
            None,
        )
        worth, refused = may_improve(costs, writer.least_overhead), list[DualBound]()

        def asked(bound: DualBound) -> bool:
            if not worth(bound):
                refused.append(bound)
            return not refused

        exact, how = self.options.exact, (seconds, asked)
        points, bound, notes = mesh_frontier(
            writer.space, exact, *how, known=frontier, points=self.options.points
        )
        if exact and (space := writer.transients.with_largest_kept) is not None:
            points += mesh_frontier(space, True, *how)[0]
        found = _Result(writer, points, bound, notes, next(iter(refused), None))
        if decide is None:
            self.made[mesh, count, parts] = found
        return found

    def run_around(self, one: AroundStrategies, seconds: float) -> None:
        """Search the mesh of some strategies, without stages or as the pipelines that they are."""
        if one.like.pp > 1:
            self.found += self.pipelines_around(one, seconds)
            return
        count = one.like.micro_batches
        self.run(one.mesh, count, seconds, compare=False, decide=one.decide)

    def pipelines_around(self, one: AroundStrategies, seconds: float) -> list[Candidate]:
        """Pipelines with the stages of some strategies that fit the memory limit by their tables.

        They are not added to `found`.
        """
        like, before = one.like, len(self.found)
        given = one.mesh, like.pp, like.micro_batches, seconds
        schedule, each, decide = like.schedule, like.virtual_stages, one.decide
        self.pipe(*given, compare=False, schedule=schedule, each=each, decide=decide)
        new, self.found[before:] = self.found[before:], []
        return [one for one in new if one.peak <= self._limit]

    def run_again(self, one: Searched, space: Space, seconds: float) -> None:
        """Search `space`, a subset of that of `one`, whose bound does not hold for all plans."""
        costs = self.costs
        worth = may_improve(costs, one.writer.least_overhead)
        points, _, notes = mesh_frontier(space, self.options.exact, seconds, worth)
        self._add(one, points, notes, again=True)

    def _add(
        self, one: Searched, points: list[Point], notes: tuple[str, ...], *, again: bool = False
    ) -> list[Candidate]:
        """Add the candidates of these points of a search."""
        writer, every = one.writer, (*one.notes, *notes)
        new = [
            Candidate(point, peak, writer, "searched", every, again=again)
            for point, peak in zip(points, writer.peaks(points), strict=True)
        ]
        self.found += new
        return new

    def pipe(
        self,
        mesh: Mesh,
        groups: int,
        count: int,
        seconds: float,
        *,
        compare: bool,
        schedule: str = "",
        each: int = 1,
        decide: Callable[[CostModel], Allowed] | None = None,
    ) -> Gain:
        """Search pipelines of `groups` device groups, each on `mesh`.

        The frontier of the whole model on one group gives the lower bound: together the stages do
        that work, in the sum of their times and within the sum of their memory.

        Args:
            mesh: the mesh of one group.
            groups: the number of groups.
            count: the number of micro-batches.
            seconds: the time limit.
            compare: whether to add the even pipeline as a baseline.
            schedule: its name; by default 1F1B, or GPipe where 1F1B cannot run.
            each: stages on each group.
            decide: the choices to search, if not all.

        Returns:
            The number of new plans and the seconds of the fastest.
        """
        group = self._group(mesh, count, seconds, decide)
        writer, alone, once = group.offer.writer, group.alone, group.most_updates
        costs = self.costs
        schedule = schedule or schedule_of(groups, count)
        counted = most_counted(self.machine, mesh, count)

        def bound(memory: float) -> float:
            work = alone(groups * memory) / counted
            return least_step_seconds(schedule, work, once / counted, groups, count)

        self.bounds.append(MeshBound(0, bound))
        promising = may_beat(costs, bound)
        if compare:
            self._add_even(group.offer, groups)
        if not promising:
            return NOTHING
        pipelines = Pipelines(group.offer, self.factory.cuts, groups, schedule, each)
        asynchronous = schedule_named(schedule).asynchronous
        every = (*self.notes, *group.notes, *((_OTHER_TRAINING,) if asynchronous else ()))
        shared = writer, "searched", every, ()
        new = [
            Candidate(one.point, one.peak, *shared, one, partial(pipelines.memory, one))
            for one in pipelines.staged()
        ]
        self.found += new
        if new:  # other schedules will use it
            self._groups[mesh, count] = group
        most = self.machine.device.memory_bytes
        seconds = min((c.point.time * max(1.0, c.peak / most) for c in new), default=math.inf)
        return Gain(sum(is_new(c.cost, costs, GAIN) for c in new), seconds)

    def compare_even(self, mesh: Mesh, groups: int, count: int) -> None:
        """Add the even pipeline of `groups`, each data parallel on `mesh`, as a baseline."""
        self._add_even(Offer(self.writer(self.factory, mesh, count, staged=True), ()), groups)

    def _add_even(self, offer: Offer, groups: int) -> None:
        space = offer.writer.space
        schedule = schedule_of(groups, space.model.micro_batches)
        pipelines = Pipelines(offer, self.factory.cuts, groups, schedule)
        assignment = next((a for _, a in baselines(space)), None)
        if assignment is None:
            return
        one = pipelines.even(space.folded.expand(assignment))
        if one is not None:
            name = "even pipeline"
            memory = partial(pipelines.memory, one)
            self.known.append(
                Candidate(one.point, one.peak, offer.writer, name, (), (), one, memory)
            )

    def _group(
        self,
        mesh: Mesh,
        count: int,
        seconds: float,
        decide: Callable[[CostModel], Allowed] | None = None,
    ) -> _Group:
        """The search result of one group of a pipeline."""
        if (mesh, count) in self._groups:
            return self._groups[mesh, count]
        writer = self.writer(self.factory, mesh, count, staged=True, decide=decide)
        points, alone, notes = mesh_frontier(
            writer.space, False, seconds, lambda _: False, _WEIGHTS_PER_PIPE
        )
        return _Group(Offer(writer, points), alone, notes, most_updates(writer))

    def _bound_of(
        self, writer: PlanBuilder, bound: BoundByBytes, mesh: Mesh, count: int
    ) -> MeshBound:
        """The bound on step times of a mesh from that on additive seconds.

        These have an estimate of copies to the host and back, which steps may hide.
        """
        space, overhead = writer.space, writer.least_overhead
        if not space.most_copy_seconds:
            return MeshBound(overhead, self._on_steps(bound, mesh, count))
        return MeshBound(
            overhead,
            self._on_steps(hides_copies(bound, space), mesh, count),
            lambda: self._on_steps(without_copies(space), mesh, count),
        )

    def _on_steps(self, bound: BoundByBytes, mesh: Mesh, count: int) -> BoundByBytes:
        """The bound on simulated step times that follows from `bound` on additive seconds."""
        counted = most_counted(self.machine, mesh, count)
        if not self.machine.settles:
            return lambda memory: bound(memory) / counted
        shared = most_shared(self.factory.graph, self._waiting(mesh, 1), mesh, count)
        return lambda memory: max(0.0, bound(memory) - shared) / counted

    def refuse(self, error: ConstraintError) -> None:
        """Record why a mesh has no plan."""
        self.refused.append(str(error))

    def compare(self, factory: SpaceFactory, mesh: Mesh, count: int, marks: Marks) -> None:
        """Add the baselines of one mesh, from spaces of `factory`, which has no constraints."""
        writer = self.writer(factory, mesh, count)
        self.known += baseline_candidates(writer, self.options.constraints, marks)

    def writer(
        self,
        factory: SpaceFactory,
        mesh: Mesh,
        count: int,
        *,
        staged: bool = False,
        decide: Callable[[CostModel], Allowed] | None = None,
        parts: bool = False,
    ) -> PlanBuilder:
        """The plan builder of one mesh, or of the group of a pipeline."""
        machine = self._waiting(mesh, count, staged=staged)
        optimizer = self.options.optimizer
        # Stages of asynchronous pipelines recompute all operators of a segment.
        skeleton = replace(SEARCHED_EXACTLY if self.options.exact else SEARCHED, parts=parts)
        if staged and self.options.allow_async:
            skeleton = replace(FREE, keeps_copies=False)
        host = self.host and not staged
        space, short = factory.space(machine, mesh, optimizer, count, decide, skeleton, host=host)
        found = PlanBuilder(space, factory.graph, short, optimizer)
        found.transients = Peaks(space, in_order=self.options.exact and not staged)
        return found

    def _waiting(self, mesh: Mesh, count: int, *, staged: bool = False) -> Machine:
        """The machine with the straggler time of `mesh` in one of `count` micro-batches."""
        return skewed(self.machine, lambda: self._stretch, mesh.size * count, whole=staged)

    @cached_property
    def ahead(self) -> MeshesAhead:
        """Meshes that were searched in other processes before their turn."""
        return MeshesAhead(self.options.processes)

    @cached_property
    def _stretch(self) -> Seconds:
        return stretch(self.factory.graph, self.factory.analysis, self.machine)

    def bound(self, peak: Bytes, most: float = math.inf, *, closer: bool = True) -> float:
        """A lower bound of the seconds of all plans within `peak` bytes; see `least_seconds`."""
        if not (self.machine.settles or self.machine.charges_hidden):  # else steps may be shorter
            most = min([most, *(c.point.time for c in self.permitted if c.peak <= peak)])
        return least_seconds(self.bounds, peak, most, closer=closer)
