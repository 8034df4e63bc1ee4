"""Lower bounds of a problem for each choice of a node that every copy of a repeat reads.

Each reader of another shared input may choose for that input independently, so that no table is
over two shared inputs. The relaxation only lowers costs, so every value is a lower bound.

Paper: mini-buckets (Dechter and Rish 2003), of one bucket for each reader.
Complexity: one elimination for each shared input, with tables over that input alone.
Oracle: enumeration (`tests/property/test_shared_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from shardwright.solve.algebra.minplus import Objectives, Rows, forward, relaxed_rows
from shardwright.solve.algebra.powers import power
from shardwright.solve.elimination.schedule import EliminationSchedule, InputTable, make_schedule
from shardwright.solve.folding.folded import Folded


def shared_inputs_of(folded: Folded) -> tuple[int, ...]:
    """The nodes outside of all runs, other than entries and exits, that copies of a run read."""
    found: set[int] = set()
    taken: set[int] = set()
    for run in folded.runs:
        taken |= {*run.nodes, run.entry}
        for number in folded.inner_edges(run):
            edge = folded.problem.edges[number]
            found |= {edge.tail, edge.head}
    return tuple(sorted(found - taken))


@final
class SharedInputBounds:
    """Lower bounds for each of `shared` nodes; `too_wide` if a table would be too large."""

    def __init__(self, folded: Folded, shared: Sequence[int], max_table: int) -> None:
        self.too_wide = False
        self._inner: list[EliminationSchedule] = []  # of every shared input and run
        self._powers: dict[tuple[int, int], int] = {}  # (table, copies) -> number of the power
        self._outer: list[EliminationSchedule] = []  # of every shared input
        outer, outside = folded.outer()
        at = {node: i for i, node in enumerate(outside)}
        scopes: list[dict[int, tuple[int, ...]]] = []
        for shared_input in shared:
            scopes.append({})
            for run in folded.runs:
                template, numbers, kept = folded.template(run)
                pins = tuple(i for i in kept if numbers[i] in shared and numbers[i] != shared_input)
                stay = [i for i in kept if i not in pins]
                last = self._inner[-1] if self._inner else None
                schedule = make_schedule(template, max_table, stay, after=last, pins=pins)
                self._inner.append(schedule)
                self.too_wide |= schedule.pinned != pins
                power_of = schedule.factors[schedule.root].table, run.count
                number = self._powers.setdefault(power_of, len(self._powers))
                scopes[-1][number] = tuple(at[numbers[i]] for i in stay)
        for shared_input, given in zip(shared, scopes, strict=True):
            pins = tuple(sorted(at[other] for other in shared if other != shared_input))
            before = [*self._inner, *self._outer][-1]
            schedule = make_schedule(outer, max_table, (at[shared_input],), given, before, pins)
            self.too_wide |= schedule.pinned != pins
            self._outer.append(schedule)

    def at(self, objectives: Objectives, *, single: bool = False) -> list[Rows]:
        """A lower bound for each choice of each shared input: (L, choices) for every input.

        `single` computes in single precision.
        """

        def relaxed(leaf: InputTable) -> Rows:
            rows = relaxed_rows(leaf, objectives)
            return rows.astype(np.float32) if single else rows

        tables = forward(self._inner[-1], objectives, leaf_rows=relaxed)
        given = []
        for number, copies in self._powers:
            ends = np.moveaxis(tables[number], (1, 2), (-2, -1))
            given.append(np.moveaxis(power(ends, copies).table, (-2, -1), (1, 2)))
        tables = forward(self._outer[-1], objectives, given, tables, relaxed)
        return [tables[schedule.factors[schedule.root].table] for schedule in self._outer]
