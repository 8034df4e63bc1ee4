"""Chooses for pinned nodes: those whose elimination would need too large a table.

Paper: TensorOpt / FT (arXiv 2004.10856), heuristic elimination.
Deviation: FT fixes a choice once; here it is improved by coordinate descent: everything else is
optimal for the pins, then each pin takes its best choice given everything else, and again.
Complexity: a few eliminations, and the edges of the pinned nodes.
Oracle: none, it is a heuristic; results name the nodes that were pinned.
"""

from __future__ import annotations

import numpy as np

from shardwright.solve.algebra.minplus import Objectives, Rows, minimise
from shardwright.solve.elimination.problem import Ints, Problem
from shardwright.solve.elimination.schedule import EliminationSchedule

_ROUNDS = 4


def minimise_pinned(
    problem: Problem, schedule: EliminationSchedule, objectives: Objectives
) -> tuple[Rows, Ints]:
    """Minimise every objective, choosing for the pinned nodes too: values (L,), choices (L, N).

    Without pinned nodes the values are optimal.
    """
    num = len(problem.nodes)
    pins = best_pins(problem, schedule.pinned, objectives, None)
    values, choice = minimise(schedule, objectives, num, pins)
    for _ in range(_ROUNDS if schedule.pinned else 0):
        pins = best_pins(problem, schedule.pinned, objectives, choice)
        if np.array_equal(pins, choice[:, list(schedule.pinned)]):
            break
        new_values, new_choice = minimise(schedule, objectives, num, pins)
        better = new_values < values
        values = np.where(better, new_values, values)
        choice = np.where(better[:, None], new_choice, choice)
    return values, choice


def best_pins(
    problem: Problem, pinned: tuple[int, ...], objectives: Objectives, choice: Ints | None
) -> Ints:
    """The best choice of each pinned node, one after the other, given `choice` (L, nodes) of all.

    Without `choice` every neighbour that is not yet decided takes the choice that is best for the
    edge.
    """
    num_rows = len(objectives)
    rows = np.arange(num_rows)
    decided = None if choice is None else choice.copy()
    found: dict[int, Ints] = {}
    for node in pinned:
        cost = objectives.rows(problem.nodes[node].time, problem.nodes[node].memory)
        for edge in problem.edges:
            if node not in (edge.tail, edge.head):
                continue
            table = objectives.rows(edge.time, edge.memory)  # (L, K of tail, K of head)
            other = edge.tail if node == edge.head else edge.head
            if node == edge.tail:
                table = table.transpose(0, 2, 1)  # (L, K of other, K of node)
            if decided is not None:
                cost = cost + table[rows, decided[:, other]]
            elif other in found:
                cost = cost + table[rows, found[other]]
            else:
                cost = cost + table.min(axis=1)
        found[node] = cost.argmin(axis=1)
        if decided is not None:
            decided[:, node] = found[node]
    return (
        np.stack([found[node] for node in pinned], axis=1)
        if pinned
        else np.zeros((num_rows, 0), np.int64)
    )
