"""Min-marginals of table entries: (min, +) messages in both directions of an elimination.

The inside of a table is the cost of its part of the graph, from `minplus.forward`; the outside is
the least cost of everything else, given the table's choices. Their sum, an entry's min-marginal, is
the best value of any assignment that takes the entry.

Paper: none of the four; the two messages of min-sum belief propagation on a junction tree (Aji and
McEliece 2000).
Complexity: as the elimination, once more for every input of a join.
Oracle: enumeration of all assignments that take an entry.
Known inefficiency: equal tables at different positions have outsides of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwright.solve.algebra.minplus import Rows
from shardwright.solve.elimination.schedule import EliminationSchedule, Join


def outsides(schedule: EliminationSchedule, tables: Sequence[Rows]) -> list[Rows]:
    """The outside of every factor, of a schedule with nothing kept or pinned: (L, axes of it...).

    `tables` are the insides, one for each table of the schedule.
    """
    found: list[Rows | None] = [None] * len(schedule.factors)
    num = len(tables[0])
    found[schedule.root] = np.zeros((num, *schedule.tables[_table(schedule, schedule.root)].shape))
    for step in reversed(schedule.steps):
        join = schedule.tables[_table(schedule, step.output)]
        above = found[step.output]
        assert isinstance(join, Join) and above is not None, "steps join, and each result is used"
        beside = insides(join, tables)
        full = above[(..., None)] if join.eliminates else above
        for i, number in enumerate(step.inputs):
            total = full
            for j, other in enumerate(beside):
                if j != i:
                    total = total + other
            total = np.broadcast_to(total, np.broadcast_shapes(total.shape, (num, *join.sizes)))
            axes = join.inputs[i][1]
            gone = tuple(1 + axis for axis in range(len(join.sizes)) if axis not in axes)
            least = total.min(axis=gone) if gone else total
            order = np.argsort(np.argsort(axes))
            found[number] = least.transpose(0, *(1 + order))
    return [_known(rows) for rows in found]


def insides(join: Join, tables: Sequence[Rows]) -> list[Rows]:
    """The inputs of a join with every joint axis, of size 1 where they have none: (L, joint...)."""
    found = []
    for number, axes in join.inputs:
        ordered = tables[number].transpose(0, *(1 + i for i in np.argsort(axes)))
        joint = range(len(join.sizes))
        found.append(ordered[(slice(None), *(slice(None) if i in axes else None for i in joint))])
    return found


def _table(schedule: EliminationSchedule, factor: int) -> int:
    return schedule.factors[factor].table


def _known(rows: Rows | None) -> Rows:
    assert rows is not None, "every factor but the root is the input of a step"
    return rows
