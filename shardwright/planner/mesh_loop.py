"""The main loop of a search: one mesh and number of micro-batches after the other.

Each gives points that may become plans, a bound on what there can be, and the
well-known plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from typing import NamedTuple

from shardwright.ir.constraints import Constraint, ConstraintError
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.memory import Memory
from shardwright.ir.plan import Plan
from shardwright.ir.plan_options import DEFAULTS, PlanOptions
from shardwright.ir.schedules.registry import schedule_named
from shardwright.machine.model import Machine
from shardwright.machine.topology import contention_of
from shardwright.planner.baselines import baselines
from shardwright.planner.permitted import broken
from shardwright.planner.pipeline.stage_assignment import Pipelines, Staged, schedule_of
from shardwright.planner.pipeline.stage_costs import Offer, most_updates
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.settle import bound_on_step, most_at_once, most_hidden, most_shared
from shardwright.planner.space.constrain import NO_MARKS, Marks
from shardwright.planner.space.space import Space
from shardwright.planner.space_factory import SpaceFactory
from shardwright.simulate.time.pipelines import least_step_seconds
from shardwright.simulate.time.stragglers import skewed, stretch
from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier.fast import Effort, fast_frontier
from shardwright.solve.frontier.sweep import DualBound

RESOLUTION = 1e-3  # plans that differ by less in time and in memory tell users nothing

_POINTS_PER_MESH = 64
_WEIGHTS_PER_MESH = 40
_GAIN = 1e-2  # less than this in time or memory is not worth trying more pipelines
_WEIGHTS_PER_PIPE = 24  # as stages choose from a dozen points
_PRICED_PER_MESH = 1_000_000
_SUMS_PER_MESH = 500_000
_OTHER_TRAINING = (
    "asynchronous: stages update their weights after every mini-batch without waiting for each"
    " other, so between the two passes of a mini-batch stage k of N makes N - k - 1 updates for"
    " others, and passes use weights predicted for them; this does not train as one device does,"
    " see docs/how-to/async.md"
)
_NARROWED = "recomputation was not searched: with it this graph is too wide on this mesh"


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A point on one mesh, with what it needs to become a plan."""

    point: Point
    peak: Bytes
    writer: PlanBuilder
    name: str
    notes: tuple[str, ...]
    broken: tuple[Constraint, ...] = ()
    staged: Staged | None = None
    memory: Callable[[], Memory] | None = None  # of what is staged

    @property
    def cost(self) -> tuple[Seconds, Bytes]:
        return Seconds(self.point.time), self.peak

    @property
    def least(self) -> int:
        """Bytes that it cannot do without: state and batch, or all it needs in a pipeline."""
        return self.peak if self.staged else self.writer.lasting_bytes(self.point.choice)

    def plan(self, bound: float, notes: tuple[str, ...]) -> Plan:
        """The plan; nothing within its memory is faster than `bound` seconds."""
        staged, notes = self.staged is not None, (*self.notes, *notes)
        found = self.writer.plan(self.point, self.peak, bound, self.name, notes, staged=staged)
        if self.staged is None:
            return found
        names = tuple(self.writer.graph.ops[cut].name for cut in self.staged.cuts)
        seconds = Seconds(self.point.time)  # the pipeline's own, in which nothing is hidden
        return replace(
            found,
            step_seconds=seconds,
            lower_bound_seconds=Seconds(min(bound, seconds)),
            overlap=0.0,
            gather_overlap=None,
            mesh=self.staged.mesh,
            stages=len(names) + 1,
            schedule=self.staged.schedule,
            receive_seconds=self.staged.receive_seconds,
            cuts=names,
            memory=None if self.memory is None else self.memory(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """What is known of one group of devices of a pipeline, and offered to its stages."""

    offer: Offer
    alone: Callable[[float], float]  # seconds of all stages on it, at least, within any memory
    notes: tuple[str, ...]
    most_updates: float  # seconds


class Gain(NamedTuple):
    """What pipelines gave: how many plans that are new, and seconds of the fastest.

    A plan that does not fit into the devices counts as so many times slower as it is too large.
    """

    new: int
    seconds: float


NOTHING = Gain(0, math.inf)


@dataclass
class MeshLoop:
    """What the rounds so far have found.

    `refused` says why meshes were left out, `notes` are on all plans.
    """

    sources: SpaceFactory
    machine: Machine
    options: PlanOptions = DEFAULTS
    notes: tuple[str, ...] = ()
    found: list[Candidate] = field(default_factory=list)
    known: list[Candidate] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    fastest: dict[Mesh, Seconds] = field(default_factory=dict)  # plan on each mesh, of one group
    # Seconds within any memory, less the bytes that are needed beside what adds up.
    bounds: list[tuple[int, Callable[[float], float]]] = field(default_factory=list)
    _groups: dict[tuple[Mesh, int], _Group] = field(default_factory=dict)

    @property
    def best(self) -> Seconds | None:
        """Of the fastest plan so far."""
        return min((Seconds(c.point.time) for c in self.found), default=None)

    @property
    def permitted(self) -> list[Candidate]:
        """The well-known plans that break no constraint."""
        return [c for c in self.known if not c.broken]

    def knows(self, name: str) -> bool:
        """Whether a well-known plan of this name is there."""
        return any(c.name == name for c in self.known)

    def run(self, mesh: Mesh, count: int, seconds: float, *, compare: bool) -> bool:
        """Search one mesh with `count` micro-batches; whether that gave anything new.

        With `compare` the well-known plans are added. Raises `ConstraintError`
        where constraints leave something no choice.
        """
        writer = self.writer(self.sources, mesh, count)
        narrowed = (_NARROWED,) if mesh in self.sources.too_wide else ()
        costs = [c.cost for c in (*self.found, *self.known)]
        worth = _may_improve(costs, writer.least_overhead)
        points, bound, notes = _frontier(writer.space, self.options.exact, seconds, worth)
        self.bounds.append((writer.least_overhead, self._on_steps(bound, mesh, count)))
        new = [
            Candidate(point, peak, writer, "searched", (*self.notes, *narrowed, *notes))
            for point, peak in zip(points, writer.peaks(points), strict=True)
        ]
        self.found += new
        if points:
            fastest = min(Seconds(point.time) for point in points)
            self.fastest[mesh] = min(fastest, self.fastest.get(mesh, fastest))
        if compare:
            self.known += _baselines(writer)
        return any(_is_new(c.cost, costs) for c in new)

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
    ) -> Gain:
        """Search pipelines of `groups`, each on `mesh`; what that gave.

        Every group has `each` stages. Without a `schedule` they have that which takes least for
        one. What is known of one group alone bounds them all: together the stages do what it would
        do in their sum of time and memory.
        """
        group = self._group(mesh, count, seconds)
        writer, alone, once = group.offer.writer, group.alone, group.most_updates
        costs = [c.cost for c in (*self.found, *self.known)]
        schedule = schedule or schedule_of(groups, count)

        def bound(memory: float) -> float:
            return least_step_seconds(schedule, alone(groups * memory), once, groups, count)

        self.bounds.append((0, bound))
        room = _leaves_room(costs, bound)
        if compare:
            self._add_even(group.offer, groups)
        if not room:
            return NOTHING
        pipelines = Pipelines(group.offer, self.sources.cuts, groups, schedule, each)
        asynchronous = schedule_named(schedule).asynchronous
        every = (*self.notes, *group.notes, *((_OTHER_TRAINING,) if asynchronous else ()))
        new = [
            Candidate(
                one.point,
                one.peak,
                writer,
                "searched",
                every,
                (),
                one,
                partial(pipelines.memory, one),
            )
            for one in pipelines.staged()
        ]
        self.found += new
        if new:  # other schedules may be tried on it
            self._groups[mesh, count] = group
        most = self.machine.device.memory_bytes
        seconds = min((c.point.time * max(1.0, c.peak / most) for c in new), default=math.inf)
        return Gain(sum(_is_new(c.cost, costs, _GAIN) for c in new), seconds)

    def compare_even(self, mesh: Mesh, groups: int, count: int) -> None:
        """Add the even pipeline of `groups` on `mesh`, each doing what data parallelism does."""
        self._add_even(Offer(self.writer(self.sources, mesh, count, staged=True), ()), groups)

    def _add_even(self, offer: Offer, groups: int) -> None:
        space = offer.writer.space
        schedule = schedule_of(groups, space.model.micro_batches)
        pipelines = Pipelines(offer, self.sources.cuts, groups, schedule)
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

    def _group(self, mesh: Mesh, count: int, seconds: float) -> _Group:
        """What is searched of one group of a pipeline."""
        if (mesh, count) in self._groups:
            return self._groups[mesh, count]
        writer = self.writer(self.sources, mesh, count, staged=True)
        points, alone, notes = _frontier(
            writer.space, False, seconds, lambda _: False, _WEIGHTS_PER_PIPE
        )
        return _Group(Offer(writer, points), alone, notes, most_updates(writer))

    def _on_steps(
        self, bound: Callable[[float], float], mesh: Mesh, count: int
    ) -> Callable[[float], float]:
        """What a bound on what adds up means for steps."""
        if not self.machine.settles:
            return bound
        given = self.sources.graph, self._waiting(mesh, 1), mesh
        hidden, shared = most_hidden(*given), most_shared(*given, count)
        contention = self.machine.contention
        if count > 1:  # its simulation knows which axes share links
            pairs = combinations((name for name, size in mesh.axes if size > 1), 2)
            between = (contention_of(self.machine, mesh, *pair) for pair in pairs)
            contention = min(between, default=contention)
        at_once = most_at_once(mesh, contention)
        settled = partial(
            bound_on_step, overlap=self.machine.most_overlap, hidden=hidden, at_once=at_once
        )
        return lambda memory: settled(max(0.0, bound(memory) - shared))

    def refuse(self, error: ConstraintError) -> None:
        """Remember why a mesh has no plan."""
        self.refused.append(str(error))

    def compare(self, sources: SpaceFactory, mesh: Mesh, count: int, marks: Marks) -> None:
        """Add the well-known plans of one mesh, made from `sources` without constraints."""
        writer = self.writer(sources, mesh, count)
        self.known += _baselines(writer, self.options.constraints, marks)

    def writer(
        self, sources: SpaceFactory, mesh: Mesh, count: int, *, staged: bool = False
    ) -> PlanBuilder:
        """What writes the plans of one mesh, or of a group of a pipeline."""
        machine = self._waiting(mesh, count, staged=staged)
        optimizer = self.options.optimizer
        space, short = sources.space(machine, mesh, optimizer, count, staged=staged)
        return PlanBuilder(space, sources.graph, short, optimizer)

    def _waiting(self, mesh: Mesh, count: int, *, staged: bool = False) -> Machine:
        """The machine, with what ranks of `mesh` wait for each other in one of `count` batches."""
        return skewed(self.machine, lambda: self._stretch, mesh.size * count, whole=staged)

    @cached_property
    def _stretch(self) -> Seconds:
        return stretch(self.sources.graph, self.sources.analysis, self.machine)

    def bound(self, peak: Bytes) -> float:
        """Seconds that no plan beats whose peak memory is at most `peak`."""
        least = min(at(peak - overhead) for overhead, at in self.bounds)
        if self.machine.settles:  # a well-known plan may be faster than its parts add up to
            return least
        return min([least, *(c.point.time for c in self.permitted if c.peak <= peak)])


def _baselines(
    writer: PlanBuilder, wanted: Sequence[Constraint] = (), marks: Marks = NO_MARKS
) -> Iterator[Candidate]:
    """The well-known plans of the writer's space, with the constraints that they break."""
    space = writer.space
    named = list(baselines(space))
    points = [space.prices.point(space.folded.expand(assignment)) for _, assignment in named]
    for (name, assignment), point, peak in zip(named, points, writer.peaks(points), strict=True):
        broke: tuple[Constraint, ...] = ()
        if wanted:
            tilings, storage = space.tilings(assignment), space.storage(assignment)
            like = writer.short.stands_for
            broke = broken(wanted, marks, like, space.model, tilings, storage)
        yield Candidate(point, peak, writer, name, (), broke)


def _may_improve(
    costs: Sequence[tuple[Seconds, Bytes]], overhead: int
) -> Callable[[DualBound], bool]:
    """Whether a bound leaves room for something better than all of `costs`, peaks of plans.

    A mesh that cannot improve on the others' plans anywhere is not worth more than its ends.
    """
    corners: list[tuple[float, float]] = []
    limit = math.inf
    for seconds, peak in sorted(costs):
        if peak < limit:
            corners.append((seconds, limit - 1 - overhead))
            limit = peak
    corners.append((math.inf, limit - 1 - overhead))
    return lambda bound: any(bound.at(memory) < seconds for seconds, memory in corners)


def _leaves_room(costs: Sequence[tuple[Seconds, Bytes]], bound: Callable[[float], float]) -> bool:
    """Whether something within `bound` may be better than all of `costs`."""
    limit = math.inf
    for seconds, peak in sorted(costs):
        if peak < limit:
            if bound(limit - 1) < seconds:
                return True
            limit = peak
    return bound(limit - 1) < math.inf


def _frontier(
    space: Space,
    exact: bool,
    seconds: float,
    wanted: Callable[[DualBound], bool],
    weights: int = _WEIGHTS_PER_MESH,
) -> tuple[list[Point], Callable[[float], float], tuple[str, ...]]:
    """Points of one mesh, a lower bound on the seconds within any memory, and what to note."""
    if exact:
        result = exact_frontier(space.folded.unfolded())
        points = list(result.points)

        def best(limit: float) -> float:
            return min((p.time for p in points if p.memory <= limit), default=math.inf)

        return points, best, _pinned(space, result.pinned)
    fast = fast_frontier(
        space.folded,
        Effort(
            max_weights=weights,
            max_points=_POINTS_PER_MESH,
            seconds=seconds,
            resolution=RESOLUTION,
            max_priced=_PRICED_PER_MESH,
            max_sums=_SUMS_PER_MESH,
        ),
        wanted=wanted,
        solver=space.solver,
        prices=space.prices,
    )
    return list(fast.points), fast.lower_bound, _pinned(space, fast.pinned)


def _is_new(
    cost: tuple[Seconds, Bytes], known: Sequence[tuple[Seconds, Bytes]], resolution: float = 0.0
) -> bool:
    """Whether nothing known is as fast and as small, or more by no more than `resolution`."""
    time, memory = cost[0] * (1 + resolution), cost[1] * (1 + resolution)
    return not any(seconds <= time and peak <= memory for seconds, peak in known)


def _pinned(space: Space, nodes: tuple[int, ...]) -> tuple[str, ...]:
    if not nodes:
        return ()
    like = space.folded.node_tables()
    names = list(dict.fromkeys(space.problem.nodes[like[i]].name for i in nodes))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    shown = ", ".join(names[:5])
    return (f"the graph is too wide to search whole; pinned heuristically: {shown}{more}",)
