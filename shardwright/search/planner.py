"""The search over meshes: spaces, frontiers, baselines, and the plans made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.cost.model import CostModel
from shardwright.ir.frontier import Frontier, Plans
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.plan import Plan
from shardwright.rules.analysis import Analysis, analyze
from shardwright.search.baselines import baselines
from shardwright.search.collector import paused
from shardwright.search.eliminate import exact_frontier
from shardwright.search.fast import fast_frontier
from shardwright.search.meshes import meshes_of
from shardwright.search.pricing import PriceList
from shardwright.search.problem import Point
from shardwright.search.repeats import Short, shorten
from shardwright.search.space import Space, make_folded_space, make_space
from shardwright.search.sweep import DualBound
from shardwright.search.thinning import thin
from shardwright.search.writer import PlanWriter

Progress = Callable[[str, float], None]  # what is being done, which part of all is done

_POINTS_PER_MESH = 64
_WEIGHTS_PER_MESH = 40
_PRICED_PER_MESH = 1_000_000
_SUMS_PER_MESH = 500_000
_RESOLUTION = 1e-3  # plans that differ by less in time and in memory tell users nothing
_PLANS = 48


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A point on one mesh, with what it needs to become a plan."""

    point: Point
    peak: Bytes
    writer: PlanWriter
    name: str
    notes: tuple[str, ...]

    @property
    def cost(self) -> tuple[Seconds, Bytes]:
        return Seconds(self.point.time), self.peak


@paused()
def search(
    graph: Graph,
    machine: Machine,
    optimizer: str = "adamw",
    *,
    exact: bool = False,
    meshes: Sequence[Mesh] | None = None,
    seconds: float = math.inf,
    progress: Progress | None = None,
) -> Frontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    Every mesh of one and of two axes over all its devices is searched, unless
    `meshes` says which. `exact` gives FT's exact frontier of the additive
    costs; without it the frontier's supported points are exact and what lies
    between them is a mixture, with a lower bound on the time of each plan.
    After `seconds` the meshes that are left have their ends and baselines only,
    and bounds that are not as tight; the result then depends on this machine.
    """
    start = time.perf_counter()
    chosen = tuple(meshes or meshes_of(machine.devices))
    sources = _Sources(graph)
    found: list[Candidate] = []
    known: list[Candidate] = []
    bounds: list[tuple[PlanWriter, Callable[[float], float]]] = []
    for i, mesh in enumerate(chosen):
        if progress:
            best = f", best so far {min(c.point.time for c in found) * 1e3:.1f} ms" if found else ""
            progress(f"mesh {mesh}{best}", i / len(chosen))
        space, short = sources.space(machine, mesh, optimizer)
        writer = PlanWriter(space, graph, short, optimizer)
        wanted = _may_improve([c.cost for c in (*found, *known)], writer.least_overhead)
        left = start + seconds - time.perf_counter()
        points, bound, notes = _frontier(space, exact, left, wanted)
        bounds.append((writer, bound))
        found += [
            Candidate(point, peak, writer, "searched", notes)
            for point, peak in zip(points, writer.peaks(points), strict=True)
        ]
        prices = PriceList.of(space.folded)
        for name, assignment in baselines(space):
            whole = space.folded.spread(assignment)
            point = prices.point(whole)
            known.append(Candidate(point, writer.peaks([point])[0], writer, name, ()))
    if progress:
        progress("done", 1.0)

    def write(candidate: Candidate) -> Plan:
        bound = min(at(candidate.peak - writer.least_overhead) for writer, at in bounds)
        writer = candidate.writer
        return writer.plan(candidate.point, candidate.peak, bound, candidate.name, candidate.notes)

    every = [*found, *known]
    kept = thin(every, [c.cost for c in every], _PLANS, _RESOLUTION, [c.cost for c in known])
    return Frontier(
        _plans(kept, write),
        _plans(_first_of_each(known), write),
        search_seconds=time.perf_counter() - start,
    )


class _Sources:
    """The graph, shortened where it repeats, and whole where a space does not follow."""

    def __init__(self, graph: Graph) -> None:
        self.short = shorten(graph)
        self.analysis = analyze(self.short.graph)
        self.whole: tuple[Short, Analysis] | None = None
        self.graph = graph

    def space(self, machine: Machine, mesh: Mesh, optimizer: str) -> tuple[Space, Short]:
        short = self.short
        model = CostModel(short.graph, self.analysis, machine, mesh, optimizer)
        space = make_folded_space(model, short.repeats, short.skipped)
        if space is not None:
            return space, short
        if self.whole is None:
            self.whole = Short(self.graph, (), (), {}, {}), analyze(self.graph)
        short, analysis = self.whole
        return make_space(CostModel(self.graph, analysis, machine, mesh, optimizer)), short


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


def _first_of_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest candidate of each name, in order of first appearance."""
    best: dict[str, Candidate] = {}
    for candidate in candidates:
        known = best.get(candidate.name)
        if known is None or candidate.point.time < known.point.time:
            best[candidate.name] = candidate
    return list(best.values())
