"""Solves many scalar objectives at once by elimination over (min, +).

For a weight, `time + weight * memory` is a number, a frontier shrinks to one entry, and eliminating
a node is a (min, +) product of dense arrays `[objective, K, K]`.

Paper: the elimination of TensorOpt / FT (arXiv 2004.10856); the scalars are Lagrangian duality
(Everett 1963).
Deviation: only the values are computed forward; choices are read off backward, where one column of
each table is enough, so no table of choices is ever stored.
Complexity: K^(w+1) additions for each node and objective, at elimination width w (2 for chains).
Oracle: `tests/harness/oracles.py::enumerate_problem`.
Known inefficiency: choices that another choice beats under every objective are not removed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from shardwright.solve.elimination.problem import Floats, Ints
from shardwright.solve.elimination.schedule import (
    EliminationSchedule,
    ExternalTable,
    InputTable,
    Join,
)

Rows = Floats  # (objectives, ...)

_AT_ONCE = 1 << 17  # entries of a block of a (min, +) product, which should fit into the cache
_TINY = 1e-9  # a weight that only breaks ties


@dataclass(frozen=True, slots=True, eq=False)
class Objectives:
    """Objectives to minimise, one a row: `time * seconds + memory * bytes`."""

    time: Floats  # (L,)
    memory: Floats  # (L,)

    def __len__(self) -> int:
        return len(self.time)

    def rows(self, time: Floats, memory: Ints) -> Rows:
        """The objectives of a cost table: (...) -> (L, ...)."""
        allowed = np.isfinite(time)
        if allowed.all():
            return np.multiply.outer(self.time, time) + np.multiply.outer(self.memory, memory)
        rows = np.multiply.outer(self.time, np.where(allowed, time, 0.0))
        rows += np.multiply.outer(self.memory, memory)
        rows[:, ~allowed] = np.inf
        return rows


def weighted(weights: Floats) -> Objectives:
    """The objectives `time + weight * memory`, for each weight in seconds per byte."""
    return Objectives(np.ones(len(weights)), weights)


def extreme_objectives(most_time: float, most_memory: float) -> Objectives:
    """Four objectives: least time; least memory; and each again, ties broken by the other.

    `most_time` and `most_memory` exceed the cost of any assignment: costs tie if they are equal to
    a billionth of these.
    """
    by_memory = _TINY * (most_time or 1.0) / (most_memory or 1.0)
    by_time = _TINY * (most_memory or 1.0) / (most_time or 1.0)
    return Objectives(np.array([1.0, 0.0, 1.0, by_time]), np.array([0.0, 1.0, by_memory, 1.0]))


def minimise(
    schedule: EliminationSchedule, objectives: Objectives, num_nodes: int, pins: Ints
) -> tuple[Rows, Ints]:
    """The least value of every objective, and an assignment that attains it: (L,), (L, nodes).

    The pinned nodes choose `pins`, (L, pinned). Among equals the lower choice of a node wins.
    """
    chosen = dict(zip(schedule.pinned, pins.T, strict=True))

    def pinned_rows(leaf: InputTable) -> Rows:
        return _pinned_rows(leaf, objectives, chosen)

    if chosen:
        texts = {node: pin.tobytes() for node, pin in chosen.items()}
        like = _equal_tables(schedule, lambda pin: texts[pin])
        tables = forward(schedule, objectives, leaf_rows=pinned_rows, like=like)
    else:
        tables = forward(schedule, objectives)
    values = tables[schedule.factors[schedule.root].table]
    choice = np.zeros((len(values), num_nodes), np.int64)
    choice[:, list(schedule.pinned)] = pins
    backward(schedule, tables, choice, np.arange(len(choice)))
    return values, choice


def relaxed_minimum(schedule: EliminationSchedule, objectives: Objectives) -> Rows:
    """A lower bound of every objective over all choices of the pinned nodes: (L,).

    Every cost over a pinned node takes that node's best choice independently.
    """
    like = _equal_tables(schedule, lambda _: "relaxed") if schedule.pinned else None
    rows = partial(relaxed_rows, objectives=objectives)
    tables = forward(schedule, objectives, leaf_rows=rows, like=like)
    return tables[schedule.factors[schedule.root].table]


def _equal_tables(schedule: EliminationSchedule, pinned: Callable[[int], object]) -> list[int]:
    """For every table the first one of equal content, given what distinguishes pinned nodes.

    Pinned nodes keep tables of equal layers apart in the schedule, though they mostly choose alike.
    """
    known: dict[object, int] = {}
    found: list[int] = []
    for number, table in enumerate(schedule.tables):
        key: object
        if isinstance(table, InputTable):
            pins = tuple([None if pin is None else pinned(pin) for pin in table.pinned])
            key = id(table.time), id(table.memory), pins
        elif isinstance(table, ExternalTable):
            key = table
        else:
            inputs = tuple([(found[source], axes) for source, axes in table.inputs])
            key = table._replace(inputs=inputs)
        found.append(known.setdefault(key, number))
    return found


def _pinned_rows(leaf: InputTable, objectives: Objectives, chosen: dict[int, Ints]) -> Rows:
    table = objectives.rows(leaf.time, leaf.memory)
    rows = np.arange(len(table))
    for axis, pin in reversed(list(enumerate(leaf.pinned))):
        if pin is not None:
            table = np.moveaxis(table, axis + 1, 1)[rows, chosen[pin]]
    return table


def relaxed_rows(leaf: InputTable, objectives: Objectives) -> Rows:
    """A lower bound of a table over all choices of its pinned nodes: (L, remaining axes...)."""
    table = objectives.rows(leaf.time, leaf.memory)
    pinned = tuple(axis + 1 for axis, pin in enumerate(leaf.pinned) if pin is not None)
    return np.asarray(table.min(axis=pinned)) if pinned else table


def forward(
    schedule: EliminationSchedule,
    objectives: Objectives,
    given: Sequence[Rows] = (),
    done: Sequence[Rows] = (),
    leaf_rows: Callable[[InputTable], Rows] | None = None,
    like: Sequence[int] | None = None,
) -> list[Rows]:
    """Compute all tables of a schedule, the first of which are `done`: (L, axes of the table...).

    `leaf_rows` replaces the default weighting of cost tables by the objectives; `like` has for
    every table then the first one that is equal, whose rows it shares.
    """
    tables = list(done)
    weigh = leaf_rows or _objective_rows(schedule, objectives, len(done))
    for number, table in enumerate(schedule.tables[len(done) :], len(done)):
        if like is not None and like[number] < number:
            tables.append(tables[like[number]])
        elif isinstance(table, InputTable):
            tables.append(weigh(table))
        elif isinstance(table, ExternalTable):
            tables.append(given[table.number])
        else:
            tables.append(_join(table, tables))
    return tables


def _objective_rows(
    schedule: EliminationSchedule, objectives: Objectives, done: int
) -> Callable[[InputTable], Rows]:
    """A function from leaf to rows, which weighs all leaves after the first `done` tables at once.

    It must be called on leaves in their order.
    """
    leaves = schedule.leaves
    positions = iter([begin for table, begin in leaves.begin.items() if table >= done])
    first = min((begin for table, begin in leaves.begin.items() if table >= done), default=0)
    rows = np.multiply.outer(objectives.time, leaves.time[first:])
    rows += np.multiply.outer(objectives.memory, leaves.memory[first:])
    rows[:, leaves.forbidden[np.searchsorted(leaves.forbidden, first) :] - first] = np.inf

    def of(leaf: InputTable) -> Rows:
        begin = next(positions) - first
        own: Rows = rows[:, begin : begin + leaf.time.size]
        return own.reshape(len(objectives), *leaf.time.shape)

    return of


def _join(join: Join, tables: Sequence[Rows]) -> Rows:
    """The table of a join: the sum of its inputs, or the minimum of it over the eliminated node."""
    inputs = [_aligned(tables[number], axes, join) for number, axes in join.inputs]
    if not join.eliminates:
        return _sum(inputs)
    if len(inputs) == 1:
        return np.asarray(inputs[0].min(axis=0))
    # The eliminated node comes first: the minimum runs over whole tables.
    shape = (inputs[0].shape[1], *join.sizes[:-1])
    entries = math.prod(shape)
    if entries * join.sizes[-1] <= _AT_ONCE:
        return np.asarray(_sum(inputs).min(axis=0))
    if entries <= _AT_ONCE * shape[0]:
        return _least(inputs, np.empty(shape, inputs[0].dtype), max(1, _AT_ONCE // entries))
    found = np.empty(shape, inputs[0].dtype)
    axes = 2 if len(shape) > 2 and entries > _AT_ONCE * shape[0] * 4 else 1
    for index in np.ndindex(*shape[:axes]):  # blocks that fit into the cache
        parts = [table[_broadcast_index(index, table.shape[1:])] for table in inputs]
        _least(parts, found[index], 1)
    return found


def _broadcast_index(index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice | int, ...]:
    """The index into a table that broadcasts along axes of size 1, for an index of a joint table.

    The leading axis is taken whole.
    """
    return (slice(None), *(min(i, size - 1) for i, size in zip(index, shape, strict=False)))


def _least(inputs: Sequence[Rows], best: Rows, block: int) -> Rows:
    """Write the least sum over the first axis of `inputs` into `best`, in blocks of that axis."""
    part = np.empty((block, *best.shape), best.dtype)
    size = max(len(table) for table in inputs)
    for begin in range(0, size, block):
        end = min(begin + block, size)
        into = part[: end - begin]
        total, *others, last = (table[begin:end] for table in inputs)
        for other in others:  # in their own shape: the whole one may be many times as large
            total = total + other
        np.add(total, last, out=into)
        low = into[0] if block == 1 else into.min(axis=0)
        if begin:
            np.minimum(best, low, out=best)
        else:
            best[...] = low
    return best


def _aligned(table: Rows, axes: tuple[int, ...], join: Join) -> Rows:
    """`table` with every joint axis, of size 1 where it has none: (L, joint...).

    The axis to eliminate moves to the front.
    """
    order, index = _arrangement(axes, len(join.sizes), join.eliminates)
    return np.ascontiguousarray(table.transpose(order)[index])


@cache
def _arrangement(
    axes: tuple[int, ...], num: int, eliminates: bool
) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """The transposition and the index of a table whose axes are the joint axes `axes` of `num`."""
    objectives = -1
    joint = [num - 1, objectives, *range(num - 1)] if eliminates else [objectives, *range(num)]
    have = {objectives: 0, **{axis: 1 + i for i, axis in enumerate(axes)}}
    order = tuple(have[axis] for axis in joint if axis in have)
    return order, tuple(slice(None) if axis in have else None for axis in joint)


def _sum(tables: Sequence[Rows]) -> Rows:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def backward(
    schedule: EliminationSchedule, tables: Sequence[Rows], choice: Ints, rows: Ints
) -> None:
    """Fill in `choice` (A, nodes), last eliminated node first; kept nodes have chosen already.

    Assignment a is for objective `rows[a]`.
    """
    for step in reversed(schedule.steps):
        if step.node is None:
            continue
        columns = []  # cost of each choice of the node, given the choices of its neighbours
        for number in step.inputs:
            scope, table = schedule.factors[number]
            at = tuple(slice(None) if n == step.node else choice[:, n] for n in scope)
            columns.append(tables[table][(rows, *at)])
        choice[:, step.node] = _sum(columns).argmin(axis=1)
