"""The search over meshes: spaces, frontiers, baselines, and the plans made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.cost.memory import bucket_size
from shardwright.ir.constraints import Constraint, ConstraintError, parse_constraints
from shardwright.ir.frontier import Frontier, Plans
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.plan import Plan
from shardwright.rules.analysis import Analysis, analyze
from shardwright.search.baselines import baselines
from shardwright.search.collector import paused
from shardwright.search.constrain import NO_MARKS, Limits, Marks
from shardwright.search.eliminate import exact_frontier
from shardwright.search.fast import fast_frontier
from shardwright.search.kcutplan import kcut_frontier
from shardwright.search.meshes import mesh_of_cuts, meshes_of
from shardwright.search.micro import analyzed, possible
from shardwright.search.permitted import allowed_meshes, broken, require_one
from shardwright.search.pricing import PriceList
from shardwright.search.problem import Point
from shardwright.search.repeats import Short, shorten
from shardwright.search.settle import bound_on_step, most_summed, settled
from shardwright.search.solver import make_solver
from shardwright.search.space import Space, make_folded_space, make_space
from shardwright.search.sweep import DualBound
from shardwright.search.thinning import thin
from shardwright.search.writer import PlanWriter

Progress = Callable[[str, float], None]  # what is being done, which part of all is done

METHODS = ("joint", "kcut")

_POINTS_PER_MESH = 64
_WEIGHTS_PER_MESH = 40
_PRICED_PER_MESH = 1_000_000
_SUMS_PER_MESH = 500_000
_MOST_ENTRIES = 1_500_000  # of all tables at one weight, for recomputation to be searched
_NARROWED = "recomputation was not searched: with it this graph is too wide on this mesh"
_RESOLUTION = 1e-3  # plans that differ by less in time and in memory tell users nothing
_PLANS = 48


class MethodError(ValueError):
    """A way of searching that does not exist, or not with what else is asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A point on one mesh, with what it needs to become a plan."""

    point: Point
    peak: Bytes
    writer: PlanWriter
    name: str
    notes: tuple[str, ...]
    broken: tuple[Constraint, ...] = ()

    @property
    def cost(self) -> tuple[Seconds, Bytes]:
        return Seconds(self.point.time), self.peak


@paused()
def search(
    graph: Graph,
    machine: Machine,
    optimizer: str = "adamw",
    *,
    method: str = "joint",
    exact: bool = False,
    recompute: bool = True,
    meshes: Sequence[Mesh] | None = None,
    constraints: Sequence[str | Constraint] = (),
    micro_batches: Sequence[int] | None = (1,),
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> Frontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    With the method "kcut" it is one plan instead, SoyBean's (`kcut.py`): the devices are cut by one
    prime factor after the other, or along the axes of the one mesh in `meshes`, so that the fewest
    bytes are communicated, whatever time and memory that takes. What follows is about the method
    "joint".

    Every mesh of one and of two axes over all its devices is searched, unless
    `meshes` says which, with each number of `micro_batches`; None tries 2, 4, 8
    and so on for as long as they save memory. `constraints`, texts such as
    `pin layers.*.mlp=tp:features`
    (`ir/constraints.py`), leave out of it what they rule out; baselines that break one are shown
    and never chosen. With `recompute` pieces of the graph, such as layers, may keep nothing and run
    again in the backward pass. `exact` gives FT's exact frontier of the additive
    costs; without it the frontier's supported points are exact and what lies
    between them is a mixture, with a lower bound on the time of each plan.
    After `seconds` the meshes that are left have their ends and baselines only,
    and bounds that are not as tight; the result then depends on this machine.

    Raises `ConstraintError` for constraints that mean nothing here or that no plan can meet.
    """
    if method not in METHODS:
        raise MethodError(f"method {method!r} is not known; choose one of {', '.join(METHODS)}")
    if method == "kcut":
        whole = micro_batches is not None and tuple(micro_batches) == (1,)
        if exact or constraints or len(meshes or ()) > 1 or not whole:
            raise MethodError(
                "method 'kcut' cuts one mesh, is not `exact` and takes no constraints and no"
                " micro-batches; leave these out"
            )
        (mesh,) = meshes or (mesh_of_cuts(machine),)
        ends = partial(
            search, graph, machine, optimizer, seconds=0, recompute=False
        )  # and the baselines
        return kcut_frontier(graph, machine, optimizer, mesh, ends, progress)
    start = time.perf_counter()
    wanted = parse_constraints(constraints)
    chosen = allowed_meshes(machine.devices, wanted, meshes)
    marks = Marks.on(graph, wanted)
    sources = _Sources(graph, marks, recompute=recompute)
    counts, impossible = sources.possible(micro_batches)
    found: list[Candidate] = []
    known: list[Candidate] = []
    refused: list[str] = []  # why a mesh was left out
    bounds: list[tuple[PlanWriter, Callable[[float], float]]] = []
    rounds = [(count, mesh) for count in counts for mesh in chosen]
    useful = counts[0]  # the last number of micro-batches that gave a plan
    for i, (count, mesh) in enumerate(rounds):
        if micro_batches is None and count > 2 * useful:
            break
        if progress:
            best = f", best so far {min(c.point.time for c in found) * 1e3:.1f} ms" if found else ""
            pieces = f", {count} micro-batches" if count > 1 else ""
            progress(f"mesh {mesh}{pieces}{best}", i / len(rounds))
        try:
            space, short = sources.space(machine, mesh, optimizer, count)
        except ConstraintError as e:
            refused += [str(e)] if count == counts[0] else []
            continue
        narrowed = (_NARROWED,) if mesh in sources.too_wide else ()
        writer = PlanWriter(space, graph, short, optimizer)
        costs = [c.cost for c in (*found, *known)]
        worth = _may_improve(costs, writer.least_overhead)
        left = start + seconds - time.perf_counter()
        points, bound, notes = _frontier(space, exact, left, worth)
        bounds.append((writer, bound))
        before = len(found)
        found += [
            Candidate(point, peak, writer, "searched", (*impossible, *narrowed, *notes))
            for point, peak in zip(points, writer.peaks(points), strict=True)
        ]
        if not wanted and count == counts[0]:
            known += _baselines(writer)
        if any(_is_new(c.cost, costs) for c in found[before:]):
            useful = count
    if wanted:
        require_one(refused, len(chosen), machine.devices)
        free = _Sources(graph, recompute=False)
        for mesh in dict.fromkeys((*(meshes or meshes_of(machine.devices)), *chosen)):
            space, short = free.space(machine, mesh, optimizer, counts[0])
            known += _baselines(PlanWriter(space, graph, short, optimizer), wanted, marks)
    if progress:
        progress("done", 1.0)
    permitted = [c for c in known if not c.broken]
    most = [most_summed(graph, machine, writer.space.model.mesh) for writer, _ in bounds]

    def write(candidate: Candidate) -> Plan:
        bound = min(
            bound_on_step(at(candidate.peak - writer.least_overhead), machine.overlap, summed)
            for (writer, at), summed in zip(bounds, most, strict=True)
        )
        if not machine.overlap:
            bound = min([bound, *(c.point.time for c in permitted if c.peak <= candidate.peak)])
        writer = candidate.writer
        notes = (*candidate.notes, *_said(wanted, candidate.broken))
        return writer.plan(candidate.point, candidate.peak, bound, candidate.name, notes)

    every = [*found, *permitted]
    kept = thin(every, [c.cost for c in every], _PLANS, _RESOLUTION, [c.cost for c in permitted])
    shown = _first_of_each(known)
    plans, yardsticks = _plans(kept, write), _plans(shown, write)
    if machine.overlap:  # then times do not just add up
        kept = list({id(c): c for c in (*kept, *permitted)}.values())
        costs, written = settled(kept, write)
        plans = _settled(thin(list(zip(kept, costs, strict=True)), costs, _PLANS, 0.0), written)
        costs, written = settled(shown, write)
        yardsticks = _settled(list(zip(shown, costs, strict=True)), written)
    return Frontier(
        plans,
        yardsticks,
        search_seconds=time.perf_counter() - start,
        constraints=tuple(map(str, wanted)),
        broken={c.name: tuple(map(str, c.broken)) for c in shown if c.broken},
    )


class _Sources:
    """The graph, shortened where it repeats, and whole where a space does not follow.

    Copies that `marks` distinguish are no repeats.
    """

    def __init__(self, graph: Graph, marks: Marks = NO_MARKS, *, recompute: bool) -> None:
        self.recompute = recompute
        self.too_wide: set[Mesh] = set()  # with recomputation
        self.short = shorten(graph, marks.of)
        self.graph = graph
        self.marks = marks
        self._analyses: dict[bool, Analysis] = {}
        self._limits: dict[tuple[int, bool], Limits] = {}

    def possible(self, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Numbers of micro-batches that the graph can have, and why it cannot have others."""
        return possible(self.short.graph, self._analysis(whole=False), wanted)

    def space(
        self, machine: Machine, mesh: Mesh, optimizer: str, count: int
    ) -> tuple[Space, Short]:
        """The space on `mesh` with `count` micro-batches.

        Recomputation is left out where the space is too wide with it. Raises
        `ConstraintError` where constraints leave something no choice.
        """
        if self.recompute and mesh not in self.too_wide:
            space, short = self._space(machine, mesh, optimizer, count, recompute=True)
            solver = make_solver(space.folded, _MOST_ENTRIES)
            if not solver.pinned and solver.entries <= _MOST_ENTRIES:
                return space, short
            self.too_wide.add(mesh)
        return self._space(machine, mesh, optimizer, count, recompute=False)

    def _space(
        self, machine: Machine, mesh: Mesh, optimizer: str, count: int, *, recompute: bool
    ) -> tuple[Space, Short]:
        short, bucket = self.short, bucket_size(self.graph)
        model = self._limited(count, whole=False).model(machine, mesh, optimizer, count, bucket)
        space = make_folded_space(model, short.repeats, short.skipped, recompute=recompute)
        if space is not None:
            return space, short
        model = self._limited(count, whole=True).model(machine, mesh, optimizer, count, bucket)
        return make_space(model, recompute=recompute), Short(self.graph, (), (), {}, {})

    def _limited(self, count: int, *, whole: bool) -> Limits:
        if (count, whole) not in self._limits:
            graph = self.graph if whole else self.short.graph
            sized = analyzed(graph, self._analysis(whole=whole), count)
            self._limits[count, whole] = Limits(*sized, self.marks)
        return self._limits[count, whole]

    def _analysis(self, *, whole: bool) -> Analysis:
        if whole not in self._analyses:
            self._analyses[whole] = analyze(self.graph if whole else self.short.graph)
        return self._analyses[whole]


def _baselines(
    writer: PlanWriter, wanted: Sequence[Constraint] = (), marks: Marks = NO_MARKS
) -> Iterator[Candidate]:
    """The well-known plans of the writer's space, with the constraints that they break."""
    space = writer.space
    prices = PriceList.of(space.folded)
    for name, assignment in baselines(space):
        point = prices.point(space.folded.spread(assignment))
        tilings, storage = space.tilings(assignment), space.storage(assignment)
        like = writer.short.stands_for
        broke = broken(wanted, marks, like, space.model, tilings, storage) if wanted else ()
        yield Candidate(point, writer.peaks([point])[0], writer, name, (), broke)


def _said(wanted: Sequence[Constraint], broke: Sequence[Constraint]) -> tuple[str, ...]:
    """What a plan notes of the constraints."""
    if broke:
        return (f"breaks the constraints: {'; '.join(map(str, broke))}",)
    return (f"made under the constraints: {'; '.join(map(str, wanted))}",) if wanted else ()


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


def _frontier(
    space: Space, exact: bool, seconds: float, wanted: Callable[[DualBound], bool]
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
        max_weights=_WEIGHTS_PER_MESH,
        max_points=_POINTS_PER_MESH,
        seconds=seconds,
        resolution=_RESOLUTION,
        max_priced=_PRICED_PER_MESH,
        max_sums=_SUMS_PER_MESH,
        wanted=wanted,
    )
    return list(fast.points), fast.lower_bound, _pinned(space, fast.pinned)


def _is_new(cost: tuple[Seconds, Bytes], known: Sequence[tuple[Seconds, Bytes]]) -> bool:
    """Whether nothing known is as fast and as small."""
    return not any(seconds <= cost[0] and peak <= cost[1] for seconds, peak in known)


def _pinned(space: Space, nodes: tuple[int, ...]) -> tuple[str, ...]:
    if not nodes:
        return ()
    like = space.folded.node_tables()
    names = list(dict.fromkeys(space.problem.nodes[like[i]].name for i in nodes))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    shown = ", ".join(names[:5])
    return (f"the graph is too wide to search whole; pinned heuristically: {shown}{more}",)


def _plans(candidates: Sequence[Candidate], write: Callable[[Candidate], Plan]) -> Plans:
    return Plans([c.cost for c in candidates], lambda place: write(candidates[place]))


def _settled(
    found: Sequence[tuple[Candidate, tuple[Seconds, Bytes]]], written: Callable[[Candidate], Plan]
) -> Plans:
    return Plans([cost for _, cost in found], lambda place: written(found[place][0]))


def _first_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate of each name, in order of first appearance; permitted ones first."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.name)
        if known is None or _rank(candidate) < _rank(known):
            best[candidate.name] = candidate
    return list(best.values())


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return bool(candidate.broken), candidate.point.time
