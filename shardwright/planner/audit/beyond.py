"""Searches plans that are not uniform, on the mesh and with the options of one strategy."""

from __future__ import annotations

import time

from shardwright.ir.plan import Plan
from shardwright.ir.strategy.recompute import FULL
from shardwright.ir.strategy.strategy import Strategy
from shardwright.planner.audit.loss_forms import PricedForm
from shardwright.planner.axes.axis_names import AxisNames
from shardwright.planner.meshes.meshes import mesh_of_shape
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.plans.mesh_frontier import mesh_frontier
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.space.assembly import SEARCHED
from shardwright.planner.space.space import TooWideError
from shardwright.planner.space_factory import DecidedOptions
from shardwright.planner.strategies.expansion import sync_of
from shardwright.planner.strategies.frontier.priced_frontier import frontier_of
from shardwright.planner.strategies.frontier.union import around
from shardwright.planner.strategies.recomputation import recomputable_by
from shardwright.planner.strategies.roles import role_axes
from shardwright.planner.tables.options import Allowed


def plans_like(form: PricedForm, like: Strategy) -> SearchedFrontier | None:
    """The frontier of all plans with the mesh, micro-batches and compilation of a strategy.

    Every operator may be split in any way (on three and four axes, as in strategies there), every
    parameter stored in any way, and every layer recomputed or not. None for pipelines, which are
    not searched here, and for graphs that are too wide on this mesh.
    """
    if like.pp > 1:
        return None
    start, expansion = time.perf_counter(), form.expansion
    sizes = tuple(axis.size for axis in role_axes(like)) or (1,)
    wide = next(around([like], expansion.known_dimensions, 1), None)
    mesh = mesh_of_shape(sizes) if wide is None else wide.mesh
    decide = None if wide is None else wide.decide
    layers = recomputable_by(FULL, expansion.graph, expansion.layers)
    options = DecidedOptions(
        expansion.optimizer,
        like.micro_batches,
        layers.segments,
        sync_of(like),
        SEARCHED,
        like.compile != "off",
    )
    machine = expansion.waiting(mesh.size, like.micro_batches, staged=False)
    try:
        space, short = expansion.sources.decided_space(
            machine, mesh, options, decide or (lambda _: Allowed())
        )
    except TooWideError:
        return None
    writer = PlanBuilder(space, expansion.graph, short, expansion.optimizer)
    points, _, notes = mesh_frontier(space, False, float("inf"), lambda _: True)
    found = [
        Candidate(point, peak, writer, "searched", notes)
        for point, peak in zip(points, writer.peaks(points), strict=True)
    ]
    axes = AxisNames(expansion.machine)

    def write(candidate: Candidate) -> Plan:
        return axes.named(candidate.plan(0.0, ()))

    return frontier_of(expansion, found, form.refinement, start, write)
