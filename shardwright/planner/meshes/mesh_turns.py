"""Takes meshes and numbers of micro-batches in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardwright.ir.layout import Bytes, Mesh
from shardwright.ir.options.constraints import ConstraintError, named_axes
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.planner.memory_limits import limit_on
from shardwright.planner.meshes.bottlenecks import search_below
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.plans.candidate import may_improve
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.solve.frontier.sweep import DualBound

Progress = Callable[[str, float], None]  # the current task, and the fraction done, 0 to 1


def search_meshes(
    loop: MeshLoop,
    meshes: Sequence[Mesh],
    counts: Sequence[int],
    end: float,
    notify: Progress,
    *,
    skips: bool = True,
) -> None:
    """Search every mesh with all numbers of micro-batches.

    By default a mesh is left out after a number that gives no clearly better plan, or, as long as
    no plan fits the memory limit, after two such numbers in a row. After `end` meshes have their
    ends alone, and with `skips` no more are searched once a plan fits, if they are not given.
    """
    while_useful, compare = loop.options.counts is None, not loop.options.constraints
    useful = dict.fromkeys(meshes, counts[0])  # the last number that gave a plan
    by_parts = (False, True) if loop.options.exact and loop.factory.has_parts else (False,)
    turns = [(count, mesh, parts) for count in counts for mesh in meshes for parts in by_parts]

    def is_left_out(mesh: Mesh, count: int) -> bool:
        factor = 2 if math.isfinite(loop.best_within_limit) else 4
        return while_useful and count > factor * useful[mesh]

    limit = limit_on(loop.machine, loop.options.memory_limit)
    skips &= loop.options.meshes is None
    for i, (count, mesh, parts) in enumerate(turns):
        is_late = time.perf_counter() >= end
        if is_late and skips and _fits(loop, limit):
            break
        if mesh == meshes[0] and not (parts or is_late):
            _expect(loop, [one for one in meshes if not is_left_out(one, count)], count, end)
        if is_left_out(mesh, count):
            continue
        best = f", best so far {loop.best * 1e3:.1f} ms" if loop.best is not None else ""
        batches = f", {count} micro-batches" if count > 1 else ""
        notify(f"mesh {_shown(mesh, loop.options)}{batches}{best}", i / len(turns))
        first = count == counts[0] and not parts
        left = end - time.perf_counter()
        try:
            if loop.run(mesh, count, left, compare=first and compare, parts=parts):
                useful[mesh] = count
        except ConstraintError as e:
            if first:
                loop.refuse(e)
    if limit is not None:
        search_below(loop, Bytes(limit), end - time.perf_counter())


def _fits(loop: MeshLoop, limit: int | None) -> bool:
    """Whether a plan fits by its table, of this form of the graph or of another."""
    others = any(limit is None or peak <= limit for _, peak in loop.elsewhere)
    return others or math.isfinite(loop.best_within_limit)


def _expect(loop: MeshLoop, meshes: Sequence[Mesh], count: int, end: float) -> None:
    """Search those of these meshes at once that are not known, if processes are allowed.

    By the costs so far: in its turn a mesh may need less of a search, as more plans are known.
    """
    if loop.options.exact or not loop.ahead.is_useful:
        return
    costs, writers = loop.costs, list[tuple[tuple[Mesh, int], PlanBuilder]]()

    def wanted(writer: PlanBuilder, bound: DualBound) -> bool:
        return may_improve(costs, writer.least_overhead)(bound)

    for mesh in meshes:
        known = loop.made.get((mesh, count, False))
        if known is None or (known.refused is not None and wanted(known.writer, known.refused)):
            with suppress(ConstraintError):  # which the mesh raises again in its turn
                writers.append(((mesh, count), loop.writer(loop.factory, mesh, count)))
    loop.ahead.search(writers, wanted, end, loop.options.points)


def _shown(mesh: Mesh, options: PlanOptions) -> str:
    """The text of a searched mesh: only its sizes, unless the user named its axes."""
    named = any(name in given_names(options) for name in mesh.names)
    return str(mesh) if named else "x".join(map(str, mesh.shape))


def given_names(options: PlanOptions) -> frozenset[str]:
    """The names of axes that the user chose, which plans keep."""
    given = (name for mesh in options.meshes or () for name in mesh.names)
    return named_axes(options.constraints).union(given)
