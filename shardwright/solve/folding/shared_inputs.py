"""Lower bounds of a problem for each choice of a node that every copy of a repeat reads.

All other hubs are free to be something else for each that reads them. So no table is over two
hubs. What is left out costs nothing: each value is a lower bound.

Paper: mini-buckets (Dechter and Rish 2003), of one bucket for each reader.
Complexity: one elimination for each hub, with tables over that hub alone.
Oracle: enumeration (`tests/property/test_hubs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from shardwright.solve.algebra.minplus import Objectives, Rows, forward, relaxed_rows
from shardwright.solve.algebra.powers import power
from shardwright.solve.elimination.schedule import Leaf, Schedule, make_schedule
from shardwright.solve.folding.folded import Folded


def hubs_of(folded: Folded) -> tuple[int, ...]:
    """The nodes beside entry and exit that copies of a run read, outside of all runs."""
    found: set[int] = set()
    taken: set[int] = set()
    for run in folded.runs:
        taken |= {*run.nodes, run.entry}
        for number in folded.inner_edges(run):
            edge = folded.problem.edges[number]
            found |= {edge.tail, edge.head}
    return tuple(sorted(found - taken))


@final
class HubBounds:
    """Bounds for each of `hubs`, at least one; none if even so a table has too many entries."""

    def __init__(self, folded: Folded, hubs: Sequence[int], max_table: int) -> None:
        self.too_wide = False
        self._pieces: list[Schedule] = []  # of every hub and run
        self._powers: dict[tuple[int, int], int] = {}  # (table, copies) -> number of the power
        self._outer: list[Schedule] = []  # of every hub
        outer, outside = folded.outer()
        at = {node: i for i, node in enumerate(outside)}
        scopes: list[dict[int, tuple[int, ...]]] = []
        for hub in hubs:
            scopes.append({})
            for run in folded.runs:
                template, numbers, kept = folded.template(run)
                pins = tuple(i for i in kept if numbers[i] in hubs and numbers[i] != hub)
                stay = [i for i in kept if i not in pins]
                last = self._pieces[-1] if self._pieces else None
                piece = make_schedule(template, max_table, stay, after=last, pins=pins)
                self._pieces.append(piece)
                self.too_wide |= piece.pinned != pins
                power_of = piece.factors[piece.root].table, run.count
                number = self._powers.setdefault(power_of, len(self._powers))
                scopes[-1][number] = tuple(at[numbers[i]] for i in stay)
        for hub, given in zip(hubs, scopes, strict=True):
            pins = tuple(sorted(at[other] for other in hubs if other != hub))
            before = [*self._pieces, *self._outer][-1]
            schedule = make_schedule(outer, max_table, (at[hub],), given, before, pins)
            self.too_wide |= schedule.pinned != pins
            self._outer.append(schedule)

    def at(self, objectives: Objectives, *, single: bool = False) -> list[Rows]:
        """The least that each choice of each hub costs: (L, choices) for every hub.

        In single precision sums are rounded to it.
        """

        def relaxed(leaf: Leaf) -> Rows:
            rows = relaxed_rows(leaf, objectives)
            return rows.astype(np.float32) if single else rows

        tables = forward(self._pieces[-1], objectives, leaf_rows=relaxed)
        given = []
        for number, copies in self._powers:
            ends = np.moveaxis(tables[number], (1, 2), (-2, -1))
            given.append(np.moveaxis(power(ends, copies).table, (-2, -1), (1, 2)))
        tables = forward(self._outer[-1], objectives, given, tables, relaxed)
        return [tables[schedule.factors[schedule.root].table] for schedule in self._outer]
