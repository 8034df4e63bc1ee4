"""The search over meshes: spaces, frontiers, baselines, and the plans made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from shardwright.cost.model import CostModel
from shardwright.ir.frontier import Frontier
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Bytes, Layout, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.plan import InputSpec, Plan, PlannedOp, PlannedParameter, Transfer
from shardwright.rules.analysis import Analysis, analyze
from shardwright.rules.naming import dimension_names, split_words
from shardwright.rules.placing import place, tiling_text
from shardwright.search.baselines import baselines
from shardwright.search.eliminate import exact_frontier
from shardwright.search.fast import fast_frontier
from shardwright.search.problem import Point, price
from shardwright.search.space import Space, make_space

Progress = Callable[[str, float], None]  # what is being done, which part of all is done
_PLANS_PER_MESH = 48


def search(
    graph: Graph,
    machine: Machine,
    optimizer: str = "adamw",
    *,
    exact: bool = False,
    meshes: tuple[Mesh, ...] | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """The Pareto frontier of (step time, peak memory per rank) over all plans for `machine`.

    Every mesh of one and of two axes over all its devices is searched, unless
    `meshes` says which. `exact` gives FT's exact frontier of the additive
    costs; without it the frontier's supported points are exact and what lies
    between them is a mixture, with a lower bound on the time of each plan.
    """
    start = time.perf_counter()
    analysis = analyze(graph)
    found: list[Plan] = []
    known: list[Plan] = []
    chosen = meshes or tuple(meshes_of(machine.devices))
    for i, mesh in enumerate(chosen):
        if progress:
            progress(f"mesh {mesh}", i / len(chosen))
        space = make_space(CostModel(graph, analysis, machine, mesh, optimizer))
        writer = PlanWriter(space, optimizer)
        points, bound, notes = _frontier(space, exact=exact)
        for point in points:
            found.append(writer.plan(point, bound(point.memory), notes=notes))
        for name, assignment in baselines(space):
            point = Point(*price(space.problem, assignment), assignment)
            known.append(writer.plan(point, bound(point.memory), name=name))
    if progress:
        progress("done", 1.0)
    plans = _pareto([*found, *known])
    seconds = time.perf_counter() - start
    return Frontier(plans, tuple(_first_of_each(known)), search_seconds=seconds)


def meshes_of(devices: int) -> Iterator[Mesh]:
    """Every mesh of one and of two axes over `devices`.

    >>> [str(mesh) for mesh in meshes_of(4)]
    ['dp=4', 'dp=2 tp=2']
    """
    yield Mesh((("dp", devices),))
    for outer in range(2, devices):
        if devices % outer == 0 and devices // outer > 1:
            yield Mesh((("dp", outer), ("tp", devices // outer)))


def _frontier(
    space: Space, *, exact: bool
) -> tuple[list[Point], Callable[[float], float], tuple[str, ...]]:
    """Points of one mesh, a lower bound on the seconds within any memory, and what to note."""
    if exact:
        result = exact_frontier(space.problem)
        points = list(result.points)

        def best(limit: float) -> float:
            return min((p.time for p in points if p.memory <= limit), default=math.inf)

        return points, best, _pinned(space, result.pinned)
    fast = fast_frontier(space.problem, max_points=_PLANS_PER_MESH)
    return list(fast.points), fast.lower_bound, _pinned(space, fast.pinned)


def _pinned(space: Space, nodes: tuple[int, ...]) -> tuple[str, ...]:
    if not nodes:
        return ()
    names = ", ".join(space.problem.nodes[i].name for i in nodes[:5])
    more = f" and {len(nodes) - 5} more" if len(nodes) > 5 else ""
    return (f"the graph is too wide to search whole; pinned heuristically: {names}{more}",)


def _pareto(plans: list[Plan]) -> tuple[Plan, ...]:
    """Plans that no other beats, fastest first; of equal ones the first."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda p: (p.step_seconds, p.peak_bytes)):
        if not kept or plan.peak_bytes < kept[-1].peak_bytes:
            kept.append(plan)
    assert all(a.step_seconds < b.step_seconds for a, b in pairwise(kept))
    return tuple(kept)


def _first_of_each(plans: list[Plan]) -> list[Plan]:
    """The fastest plan of each name, in order of first appearance."""
    best: dict[str, Plan] = {}
    for plan in plans:
        if plan.name not in best or plan.step_seconds < best[plan.name].step_seconds:
            best[plan.name] = plan
    return list(best.values())


class PlanWriter:
    """Turns assignments of one space into plans."""

    def __init__(self, space: Space, optimizer: str) -> None:
        self.space = space
        self.optimizer = optimizer
        self.graph: Graph = space.model.graph
        self.analysis: Analysis = space.model.analysis
        self.mesh = space.model.mesh
        self.words = dimension_names(self.graph, self.analysis)

    def plan(
        self, point: Point, bound: float, *, name: str = "searched", notes: tuple[str, ...] = ()
    ) -> Plan:
        """The plan of a point; nothing within its memory is faster than `bound` seconds."""
        tilings, storage = self.space.tilings(point.choice), self.space.storage(point.choice)
        model = self.space.model
        ops: list[PlannedOp] = []
        transfers: list[Transfer] = []
        written = {n: Layout.replicated(self.mesh) for n in self.graph.tensor} | storage
        for op in self.graph.ops:
            placing = place(self.analysis.rules[op.name], tilings[op.name], self.mesh)
            for value in dict.fromkeys(op.operands):
                positions = [k for k, operand in enumerate(op.operands) if operand == value]
                source = written[value]
                transfers += model.transfers(value, source, op, positions, tilings[op.name])
            written.update(zip(op.outputs, placing.results, strict=True))
            seconds, held = model.operator(op, [tilings[op.name]])
            ops.append(
                PlannedOp(
                    name=op.name,
                    target=op.target,
                    source=op.source,
                    tiling=tiling_text(tilings[op.name]),
                    splits=split_words(self.analysis.rules[op.name], tilings[op.name], self.words),
                    layout=placing.results[0],
                    seconds=Seconds(float(seconds[0])),
                    saved_bytes=Bytes(int(held[0])),
                )
            )
        peak = point.memory + model.fixed_bytes() + model.transient_bytes(tilings)
        return Plan(
            fingerprint=self.graph.fingerprint,
            machine=model.machine.name,
            mesh=self.mesh,
            optimizer=self.optimizer,
            step_seconds=Seconds(point.time),
            peak_bytes=Bytes(peak),
            lower_bound_seconds=Seconds(min(bound, point.time)),
            inputs=self._inputs(),
            constants=self.graph.constants,
            parameters=tuple(self._parameters(storage)),
            ops=tuple(ops),
            transfers=tuple(transfers),
            name=name,
            notes=notes,
        )

    def _inputs(self) -> tuple[InputSpec, ...]:
        leaves = self.graph.leaves_of(LeafKind.INPUT)
        tensors = [(leaf.keys[0], self.graph.tensor[leaf.name]) for leaf in leaves]
        return tuple(InputSpec(key, t.shape, t.dtype) for key, t in tensors)

    def _parameters(self, storage: dict[str, Layout]) -> Iterator[PlannedParameter]:
        for leaf in self.space.parameters:
            seconds, held = self.space.model.parameter(leaf, [storage[leaf.name]])
            yield PlannedParameter(
                leaf.name,
                storage[leaf.name],
                Bytes(int(held[0])),
                Seconds(float(seconds[0])),
            )
