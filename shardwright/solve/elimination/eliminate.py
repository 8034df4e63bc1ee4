"""The exact frontier of any problem, by elimination.

Paper: TensorOpt / FT (arXiv 2004.10856), node, edge, branch and heuristic elimination, unroll.
Node b is eliminated by `F(a, c) = reduce ∪_b E(a, b) ⊗ N(b) ⊗ E(b, c)`, in `schedule.py`'s order.
Deviation: any number of neighbours is allowed up to `max_table`, so a graph that node, edge and
branch elimination cannot reduce is still solved exactly; and where nodes must be pinned, the
pinnings that are best for either end of the frontier are searched, and their results united.
Complexity: K^(w+1) products of frontiers for each node, at elimination width w (2 for chains).
Oracle: `tests/harness/oracles.py::enumerate_problem`, and a mixed-integer program on 30 nodes.
Known inefficiency: frontiers are never thinned. With costs that seldom tie they may grow with the
number of assignments: `fast.fast_frontier` is for those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.solve.algebra.frontier import Frontiers, product, singletons, take, union
from shardwright.solve.algebra.minplus import extreme_objectives
from shardwright.solve.elimination.pin import minimise_pinned
from shardwright.solve.elimination.pricing import PriceList, best_points
from shardwright.solve.elimination.problem import Ints, Point, Problem, most
from shardwright.solve.elimination.schedule import (
    EliminationSchedule,
    ExternalTable,
    InputTable,
    Join,
    make_schedule,
)


@dataclass(frozen=True, slots=True)
class ExactFrontier:
    """All trade-offs, fastest first and memory strictly falling.

    Complete unless nodes were `pinned`: then the frontier of the assignments in which these keep
    the choices of a heuristic.
    """

    points: tuple[Point, ...]
    pinned: tuple[int, ...]


def exact_frontier(
    problem: Problem, *, max_table: int = 20_000, memory_limit: int | None = None
) -> ExactFrontier:
    """Find every non-dominated (time, memory) of `problem`, with one assignment for each.

    `max_table` bounds the entries of a table of frontiers; beyond it nodes are pinned. Assignments
    that need more than `memory_limit` bytes are left out, early. Without a feasible assignment
    there are no points.

    >>> from shardwright.solve.elimination.problem import Node
    >>> node = Node("a", np.array([1.0, 2.0]), np.array([30, 20]))
    >>> exact_frontier(Problem((node, node))).points
    (Point(time=2.0, memory=60, choice=(0, 0)), Point(time=3.0, memory=50, choice=(0, 1)), \
Point(time=4.0, memory=40, choice=(1, 1)))
    """
    schedule = make_schedule(problem, max_table)
    pins = [()] if not schedule.pinned else _pins_of_the_ends(problem, schedule)
    found = [_assignments(schedule, len(problem.nodes), p, memory_limit) for p in pins]
    return ExactFrontier(best_points(PriceList.of(problem), found), schedule.pinned)


def _pins_of_the_ends(problem: Problem, schedule: EliminationSchedule) -> list[tuple[int, ...]]:
    _, choices = minimise_pinned(problem, schedule, extreme_objectives(*most(problem)))
    return sorted({tuple(row) for row in choices[:, list(schedule.pinned)].tolist()})


def _assignments(
    schedule: EliminationSchedule, num_nodes: int, pins: Sequence[int], limit: int | None
) -> Ints:
    """Every assignment on the frontier where the pinned nodes choose `pins`: (A, nodes)."""
    chosen = dict(zip(schedule.pinned, pins, strict=True))
    tables: list[Frontiers] = []
    for table in schedule.tables:
        if isinstance(table, InputTable):
            tables.append(_leaf(table, chosen, limit))
        elif isinstance(table, ExternalTable):
            raise AssertionError("only a folded problem has tables that are given")
        else:
            tables.append(_join(table, schedule, tables, limit))
    traces = [tables[schedule.factors[step.output].table].trace for step in schedule.steps]
    count = len(tables[schedule.factors[schedule.root].table].time)
    choice = schedule.unroll(traces, count, num_nodes)
    choice[:, list(chosen)] = list(chosen.values())
    return choice


def _leaf(leaf: InputTable, chosen: dict[int, int], limit: int | None) -> Frontiers:
    index = tuple(slice(None) if pin is None else chosen[pin] for pin in leaf.pinned)
    return singletons(np.asarray(leaf.time[index]), np.asarray(leaf.memory[index]), limit)


def _join(
    join: Join, schedule: EliminationSchedule, tables: Sequence[Frontiers], limit: int | None
) -> Frontiers:
    """The product of the inputs, united over the choices of the eliminated node.

    Its trace has the index in each input, and last, if a node was eliminated, that node's choice.
    """
    axes = join.axes

    def cells(position: int) -> Ints:
        return join.cells(position, axes, schedule.tables[join.inputs[position][0]].shape)

    first, *others = (tables[number] for number, _ in join.inputs)
    result = take(first, cells(0))
    for position, table in enumerate(others, 1):
        result = product(result, table, cells(position), limit)
    if not join.eliminates:
        return result
    return union(result.traced(np.repeat(axes[-1], result.lengths)), join.sizes[-1])
