"""The best assignment under each of many scalar objectives at once: elimination over (min, +).

For a weight, `time + weight * memory` is a number, a frontier shrinks to one entry, and eliminating
a node is a (min, +) product of dense arrays `[objective, K, K]`.

Paper: the elimination of TensorOpt / FT (arXiv 2004.10856); the scalars are Lagrangian duality
(Everett 1963).
Deviation: only the values are computed forward; choices are read off backward, where one column of
each table is enough, so no table of choices is ever stored.
Complexity: K^(w+1) additions for each node and objective, at elimination width w (2 for chains).
Oracle: `tests/oracles.py::enumerate_problem`.
Known inefficiency: choices that another choice beats under every objective are not removed first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.search.problem import Floats, Ints
from shardwright.search.schedule import Join, Leaf, Schedule

Rows = NDArray[Any]  # (objectives, ...), float64 or complex128
Objectives = Callable[[Floats, Ints], Rows]  # a table's time and memory -> its rows

_BLOCK = 1 << 17  # entries added at once in a (min, +) product: they should stay in cache


def weighted(weights: Floats) -> Objectives:
    """The objectives `time + weight * memory`, for each weight in seconds per byte."""

    def rows(time: Floats, memory: Ints) -> Rows:
        return time + np.multiply.outer(weights, memory)

    return rows


def ends(time: Floats, memory: Ints) -> Rows:
    """Two objectives: least time, then least memory; and least memory, then least time.

    numpy orders complex numbers by real, then imaginary part, which is all that this needs.
    """
    allowed = np.isfinite(time)
    rows = np.empty((2, *time.shape), np.complex128)
    rows.real[0], rows.imag[0] = time, memory
    rows.real[1], rows.imag[1] = np.where(allowed, memory, np.inf), np.where(allowed, time, 0)
    return rows


def minimise(
    schedule: Schedule, objectives: Objectives, num_nodes: int, pins: Ints
) -> tuple[Rows, Ints]:
    """Least value of every objective, and an assignment that reaches it: (L,), (L, nodes).

    The pinned nodes choose `pins`, (L, pinned). Of equals the lower choice of a node wins.
    """
    chosen = dict(zip(schedule.pinned, pins.T, strict=True))
    tables = _forward(schedule, lambda leaf: _pinned_rows(leaf, objectives, chosen))
    values = tables[schedule.factors[schedule.root].table]
    choice = np.zeros((len(values), num_nodes), np.int64)
    choice[:, list(schedule.pinned)] = pins
    _backward(schedule, tables, choice)
    return values, choice


def relaxed_minimum(schedule: Schedule, objectives: Objectives) -> Rows:
    """At most the least value of every objective, whatever the pinned nodes choose: (L,).

    Every cost that mentions a pinned node takes that node's best choice on its own.
    """
    tables = _forward(schedule, lambda leaf: _relaxed_rows(leaf, objectives))
    return tables[schedule.factors[schedule.root].table]


def _pinned_rows(leaf: Leaf, objectives: Objectives, chosen: dict[int, Ints]) -> Rows:
    table = objectives(leaf.time, leaf.memory)
    rows = np.arange(len(table))
    for axis, pin in reversed(list(enumerate(leaf.pinned))):
        if pin is not None:
            table = np.moveaxis(table, axis + 1, 1)[rows, chosen[pin]]
    return table


def _relaxed_rows(leaf: Leaf, objectives: Objectives) -> Rows:
    table = objectives(leaf.time, leaf.memory)
    pinned = tuple(axis + 1 for axis, pin in enumerate(leaf.pinned) if pin is not None)
    return np.asarray(table.min(axis=pinned)) if pinned else table


def _forward(schedule: Schedule, leaf_rows: Callable[[Leaf], Rows]) -> list[Rows]:
    tables: list[Rows] = []
    for table in schedule.tables:
        if isinstance(table, Leaf):
            tables.append(leaf_rows(table))
        else:
            tables.append(_join(table, tables))
    return tables


def _join(join: Join, tables: Sequence[Rows]) -> Rows:
    inputs = [_aligned(tables[number], axes, join) for number, axes in join.inputs]
    if not join.eliminates:
        return _sum(inputs)
    if len(inputs) == 1:
        return np.asarray(inputs[0].min(axis=0))
    # The eliminated node comes first: the minimum runs over whole tables, block by block.
    block = max(1, _BLOCK // max(1, np.broadcast(*(table[0] for table in inputs)).size))
    best = None
    for begin in range(0, join.sizes[-1], block):
        part = _sum([table[begin : begin + block] for table in inputs]).min(axis=0)
        best = part if best is None else np.minimum(best, part, out=best)
    return np.asarray(best)


def _aligned(table: Rows, axes: tuple[int, ...], join: Join) -> Rows:
    """`table` with every joint axis, of size 1 where it has none: (L, joint...).

    An axis that is to be eliminated moves to the front.
    """
    ordered = table.transpose(0, *(1 + i for i in np.argsort(axes)))
    joint = range(len(join.sizes))
    full = ordered[(slice(None), *(slice(None) if i in axes else None for i in joint))]
    return np.ascontiguousarray(np.moveaxis(full, -1, 0) if join.eliminates else full)


def _sum(tables: Sequence[Rows]) -> Rows:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total


def _backward(schedule: Schedule, tables: Sequence[Rows], choice: Ints) -> None:
    """Fill in `choice` (L, nodes), last eliminated node first."""
    rows = np.arange(len(choice))
    for step in reversed(schedule.steps):
        if step.node is None:
            continue
        columns = []  # what each choice of the node costs, all its neighbours being decided
        for number in step.inputs:
            scope, table = schedule.factors[number]
            at = tuple(slice(None) if n == step.node else choice[:, n] for n in scope)
            columns.append(tables[table][(rows, *at)])
        choice[:, step.node] = _sum(columns).argmin(axis=1)
