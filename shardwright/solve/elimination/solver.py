"""Minimisers of a folded problem: one assignment for each of many objectives.

Paper: elimination is TensorOpt's (arXiv 2004.10856), folding TAPAS' (arXiv 2302.00247). The inside
of one copy of each run is eliminated, which leaves a table from entry to exit; the power of this
table replaces all copies; the nodes outside are eliminated last.
Deviation: where a graph is so wide that nodes must be pinned it is not folded, and a few more are
pinned, because coordinate descent computes all tables once for each of its rounds.
Complexity: one elimination for each run, log n products for n copies.
Oracle: the same without runs, and `tests/harness/oracles.py::enumerate_problem`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol, final

import numpy as np

from shardwright.solve.algebra.minplus import Objectives, Rows, backward, forward, relaxed_minimum
from shardwright.solve.algebra.powers import paths, power
from shardwright.solve.elimination.merged import Merged, merge
from shardwright.solve.elimination.pin import minimise_pinned
from shardwright.solve.elimination.problem import Ints, Problem
from shardwright.solve.elimination.schedule import EliminationSchedule, make_schedule
from shardwright.solve.folding.bound_pruning import PrunedProblem, pruned_by_bounds
from shardwright.solve.folding.folded import Folded

_WIDE = 100_000  # entries of the table of one run, beyond which shared inputs are pruned
_PINNED_TABLE = 60_000  # the same where nodes are pinned, whose rounds compute all tables again


class Solver(Protocol):
    """Minimises many objectives of one problem."""

    @property
    def pinned(self) -> tuple[int, ...]:
        """Nodes whose choices are only heuristic."""

    @property
    def entries(self) -> int:
        """Size of all tables for one objective."""

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]:
        """A lower bound, tight without pins, and an assignment per objective: (L,), (L, N)."""


def make_solver(folded: Folded, max_table: int) -> Solver:
    """The solver for a problem: with merged nodes, and folded where possible."""
    merged = merge(folded)
    if folded.runs:
        make = partial(_FoldedSolver, max_table=max_table)
        ranges = (
            pruned_by_bounds(merged.folded, max_table, make) if merged.folded.widest > _WIDE else ()
        )
        parts = [make(narrow.folded) for narrow in ranges]
        if parts and not any(part.too_wide for part in parts):
            return _MergedSolver(merged, _PrunedSolver(ranges, parts))
        solver = make(merged.folded)
        if not solver.too_wide:
            return _MergedSolver(merged, solver)
    return _MergedSolver(merged, _FlatSolver(merged.folded.unfolded(), max_table))


@final
class _MergedSolver:
    """Solves a problem with some of its nodes merged."""

    def __init__(self, merged: Merged, solver: Solver) -> None:
        self.merged = merged
        self.solver = solver
        self.pinned = merged.originals(solver.pinned)
        self.entries = solver.entries

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]:
        values, choice = self.solver.minimise(objectives)
        return values, self.merged.expand(choice)


@final
class _PrunedSolver:
    """Solves a problem with fewer choices, pruned for one range of objectives each."""

    def __init__(self, ranges: Sequence[PrunedProblem], solvers: Sequence[_FoldedSolver]) -> None:
        self.ranges = ranges
        self.solvers = solvers
        self.pinned: tuple[int, ...] = ()
        self.entries = max(solver.entries for solver in solvers)

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]:
        with np.errstate(divide="ignore"):
            weights = objectives.memory / objectives.time
        which = np.searchsorted([narrow.most for narrow in self.ranges], weights)
        values = np.empty(len(weights))
        choice = np.empty((len(weights), self.ranges[0].folded.num_nodes), np.int64)
        for number in np.unique(which).tolist():
            rows = np.flatnonzero(which == number)
            part = Objectives(objectives.time[rows], objectives.memory[rows])
            values[rows], found = self.solvers[number].minimise(part)
            choice[rows] = self.ranges[number].expand(found)
        return values, choice


@final
class _FlatSolver:
    def __init__(self, problem: Problem, max_table: int) -> None:
        self.problem = problem
        schedule = make_schedule(problem, max_table)
        if schedule.pinned:
            schedule = make_schedule(problem, min(max_table, _PINNED_TABLE))
        self.schedule = schedule
        self.pinned = self.schedule.pinned
        self.entries = _entries(self.schedule)

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]:
        values, choice = minimise_pinned(self.problem, self.schedule, objectives)
        if self.pinned:
            values = relaxed_minimum(self.schedule, objectives)
        return values, choice


class _RunElimination(NamedTuple):
    """The elimination of the inside of one copy of a run."""

    copies: int
    schedule: EliminationSchedule
    numbers: tuple[int, ...]  # nodes in the folded problem: entry, exit, shared inputs, inside
    kept: int  # how many of these are not eliminated
    positions: Ints  # (copies, the run's nodes) in a whole assignment
    order: tuple[int, ...]  # the run's nodes, as numbers of the template


@final
class _FoldedSolver:
    def __init__(self, folded: Folded, max_table: int) -> None:
        self.folded = folded
        outer, self.numbers = folded.outer()
        at = {node: i for i, node in enumerate(self.numbers)}
        self.runs: list[_RunElimination] = []
        scopes = []
        last: EliminationSchedule | None = None
        for number, run in enumerate(folded.runs):
            template, numbers, kept = folded.template(run)
            schedule = last = make_schedule(template, max_table, kept, after=last)
            order = tuple(numbers.index(node) for node in run.nodes)
            positions = folded.positions(number)
            self.runs.append(
                _RunElimination(run.count, schedule, numbers, len(kept), positions, order)
            )
            scopes.append(tuple(at[node] for node in numbers[: len(kept)]))
        self.scopes = scopes
        self.schedule = make_schedule(outer, max_table, given=dict(enumerate(scopes)), after=last)
        schedules = [
            self.schedule,
            *(run.schedule for run in self.runs),
        ]
        self.too_wide = any(schedule.pinned for schedule in schedules)
        self.pinned = ()
        self.entries = _entries(self.schedule)

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]:
        tables: list[Rows] = []
        powers = []
        for run in self.runs:
            tables = forward(run.schedule, objectives, done=tables)
            table = tables[run.schedule.factors[run.schedule.root].table]
            powers.append(power(np.moveaxis(table, (1, 2), (-2, -1)), run.copies))
        given = [np.moveaxis(p.table, (-2, -1), (1, 2)) for p in powers]
        outer = forward(self.schedule, objectives, given, tables)
        values = outer[self.schedule.factors[self.schedule.root].table]
        rows = np.arange(len(values))
        mine = np.zeros((len(rows), len(self.numbers)), np.int64)
        backward(self.schedule, outer, mine, rows)
        choice = np.zeros((len(rows), self.folded.num_nodes), np.int64)
        choice[:, list(self.numbers)] = mine
        for run, found, scope in zip(self.runs, powers, self.scopes, strict=True):
            shared = [mine[:, i] for i in scope[2:]]
            steps = paths(found, (rows, *shared), mine[:, scope[0]], mine[:, scope[1]])
            inside = np.zeros((len(rows), run.copies, len(run.numbers)), np.int64)
            inside[:, :, 0], inside[:, :, 1] = steps[:, :-1], steps[:, 1:]
            for i, shared_input in enumerate(shared):
                inside[:, :, 2 + i] = shared_input[:, None]
            flat = inside.reshape(-1, len(run.numbers))
            objective = np.repeat(rows, run.copies)
            first, like = _distinct(np.column_stack((objective, flat[:, : run.kept])))
            different = flat[first]  # copies with equal ends choose the same inside
            backward(run.schedule, tables, different, objective[first])
            own = different[:, list(run.order)][like]
            choice[:, run.positions] = own.reshape(len(rows), run.copies, -1)
        return values, choice


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The indices of the distinct rows, and for each row its place among these: (D,), (A,)."""
    sizes = rows.max(axis=0) + 1
    if math.prod(sizes.tolist()) >= 2**63:
        return np.arange(len(rows)), np.arange(len(rows))
    keys = np.ravel_multi_index(tuple(rows.T), tuple(sizes.tolist()))
    _, first, like = np.unique(keys, return_index=True, return_inverse=True)
    return first, like


def _entries(schedule: EliminationSchedule) -> int:
    return sum(int(np.prod(table.shape)) for table in schedule.tables)
