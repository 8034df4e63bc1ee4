"""Frontier algebra within a region: points that cannot end inside are dropped.

Paper: the elimination is TensorOpt's (arXiv 2004.10856, see `eliminate.py`); a partial sum is
dropped once it, with the least that the rest costs under each of several objectives, leaves the
region (bounding, as in the dynamic programs for knapsacks of Pisinger 1997).
Deviation: points closer than a slack in time stand in for one another.
Complexity: that of `eliminate.py` on what survives; a budget of sums ends it.
Oracle: `eliminate.exact_frontier`.
Known inefficiency: equal tables at different positions are multiplied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardwright.solve.algebra.frontier import (
    Frontiers,
    Keep,
    product,
    select,
    singletons,
    take,
    thin_by_time,
    union,
)
from shardwright.solve.algebra.marginals import insides, outsides
from shardwright.solve.algebra.minplus import Rows, forward
from shardwright.solve.algebra.region import Bools, DominatedRegion
from shardwright.solve.elimination.problem import Floats, Ints, Problem
from shardwright.solve.elimination.schedule import (
    EliminationSchedule,
    EliminationStep,
    Join,
    make_schedule,
)

SUMS_PER_STEP = 500  # cost of a step that makes no sums, in sums
_TABLE = 250_000  # frontiers of a table, at most


class AssignmentsInRegion(NamedTuple):
    """Assignments of a problem inside a region: (A, nodes).

    For every assignment in the region one of these needs no more memory and at most `slack` seconds
    more, unless those seconds leave the region.
    """

    assignments: Ints
    slack: float


class Budget:
    """The number of sums of two points that may still be made."""

    def __init__(self, sums: int) -> None:
        self.left = sums

    def spend(self, sums: int) -> None:
        """Subtract `sums`; raises `BudgetExceededError` when fewer are left."""
        self.left -= sums
        if self.left < 0:
            raise BudgetExceededError


class BudgetExceededError(Exception):
    """The budget is used up. Caught inside this package."""


def without_excluded_choices(
    problem: Problem, schedule: EliminationSchedule, tables: Sequence[Rows], region: DominatedRegion
) -> tuple[Problem, list[Ints]] | None:
    """The problem without choices that lead out of the region, and the remaining choices; or None.

    `schedule` is of all of `problem`, and `tables` hold the region's objectives.
    """
    outside = outsides(schedule, tables)
    alive: list[Bools] = []
    for number, (factor, rest) in enumerate(zip(schedule.factors, outside, strict=True)):
        if number == len(problem.parts):
            break
        total = tables[factor.table] + rest
        alive.append(region.may_contain(total.reshape(len(total), -1)).reshape(total.shape[1:]))
    num = len(problem.nodes)
    kept = [np.flatnonzero(mask) for mask in alive[:num]]
    if not all(choices.size for choices in kept):
        return None
    nodes = tuple(
        type(node)(node.name, node.time[choices], node.memory[choices])
        for node, choices in zip(problem.nodes, kept, strict=True)
    )
    edges = []
    for edge, mask in zip(problem.edges, alive[num:], strict=True):
        both = np.ix_(kept[edge.tail], kept[edge.head])
        time = np.where(mask[both], edge.time[both], np.inf)
        edges.append(type(edge)(edge.tail, edge.head, time, edge.memory[both]))
    return Problem(nodes, tuple(edges)), kept


def assignments_in_region(
    problem: Problem, region: DominatedRegion, slack: float, budget: Budget
) -> AssignmentsInRegion:
    """The part of the frontier of `problem` in the region, up to `slack` seconds.

    Raises `BudgetExceededError` where the budget does not suffice or a table would be too large.
    """
    schedule = make_schedule(problem, _TABLE)
    if schedule.pinned:
        raise BudgetExceededError
    budget.spend(len(schedule.steps) * SUMS_PER_STEP)
    tables = forward(schedule, region.objectives)
    outside = outsides(schedule, tables)
    each = slack / max(1, len(schedule.steps))
    used = 0.0
    points: dict[int, Frontiers] = {}
    trace: list[tuple[Ints, ...]] = []
    for number, part in enumerate(problem.parts):
        points[number] = _pruned(singletons(part.time, part.memory), region, outside[number])
    for step in schedule.steps:
        inputs = [points.pop(number) for number in step.inputs]
        result = _join(schedule, step, inputs, tables, outside[step.output], region, budget)
        if each > 0:
            thinner = thin_by_time(result, each)
            used += each * (len(thinner.time) < len(result.time))
            result = thinner
        trace.append(result.trace)
        points[step.output] = Frontiers(result.starts, result.time, result.memory)
    found = schedule.unroll(trace, len(points[schedule.root].time), len(problem.nodes))
    return AssignmentsInRegion(found, used)


def _pruned(table: Frontiers, region: DominatedRegion, outside: Rows) -> Frontiers:
    cell = np.repeat(np.arange(len(table)), table.lengths)
    return select(
        table, _keep(region, outside.reshape(len(outside), -1))(cell, table.time, table.memory)
    )


def _keep(region: DominatedRegion, rest: Rows) -> Keep:
    def keep(cell: Ints, time: Floats, memory: Ints) -> Bools:
        return region.may_contain_sums(time, memory, rest, cell)

    return keep


def _join(
    schedule: EliminationSchedule,
    step: EliminationStep,
    inputs: Sequence[Frontiers],
    tables: Sequence[Rows],
    outside: Rows,
    region: DominatedRegion,
    budget: Budget,
) -> Frontiers:
    """The join of `eliminate.py`, without points that lead out of the region."""
    join = schedule.tables[schedule.factors[step.output].table]
    assert isinstance(join, Join), "a step computes its output"
    axes = join.axes

    def cells(position: int) -> Ints:
        return join.cells(position, axes, schedule.tables[join.inputs[position][0]].shape)

    beside = insides(join, tables)
    shape = (len(region.objectives), *join.sizes)

    def rest(position: int) -> Rows:
        """Lower bounds of the inputs after `position` and of the outside: (L, joint cells)."""
        total = outside[(..., None)] if join.eliminates else outside
        for other in beside[position + 1 :]:
            total = total + other
        return np.broadcast_to(total, shape).reshape(len(region.objectives), -1)

    result = take(inputs[0], cells(0))
    budget.spend(len(result.time))
    result = select(
        result,
        _keep(region, rest(0))(
            np.repeat(np.arange(len(result)), result.lengths), result.time, result.memory
        ),
    )
    for position in range(1, len(inputs)):
        own = cells(position)
        budget.spend(int((result.lengths * inputs[position].lengths[own]).sum()))
        result = product(result, inputs[position], own, keep=_keep(region, rest(position)))
    if not join.eliminates:
        return result
    return union(result.traced(np.repeat(axes[-1], result.lengths)), join.sizes[-1])
