"""Prunes choices of shared inputs by bounds before a problem is solved.

Every layer of a decoder reads a mask, and the output of an encoder. Tables over both and over what
enters and leaves a layer are nearly all the work, although at any one weight only one or two
layouts of each are worth it. A choice is left out, for a range of weights of time and of memory,
where the least that it costs (`hubs.py`) is more than what is known to be possible. So the least
value of every objective is as before.

Both are known at a few weights only. As functions of the weights (of time, of memory) both are the
least of linear functions, so the first lies above its chords; the second is that of known points,
and is furthest above a chord where two of these tie. There they are compared.

Paper: variable fixing by reduced costs, as for integer programs.
Complexity: a few eliminations over one hub each.
Oracle: the same problem, not narrowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import numpy as np

from shardwright.solve.algebra.frontier import reduce
from shardwright.solve.algebra.minplus import Objectives, Rows, ends
from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Bools, Edge, Floats, Ints, Node, Problem
from shardwright.solve.folding.folded import Folded
from shardwright.solve.folding.shared_inputs import HubBounds, hubs_of

_WEIGHTS, _SPAN = 7, 30.0  # at which bounds are known, around time over memory of the smallest
_FEW = 150  # combinations of choices that do not ask for a range of their own


class _Solves(Protocol):
    """What finds the best assignment of a problem under each objective."""

    too_wide: bool

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]: ...


@final
@dataclass(frozen=True, eq=False)
class Narrowed:
    """A problem without some choices, for objectives with at most `most` of memory for a second.

    `left` are the choices that each hub has.
    """

    folded: Folded
    left: Mapping[int, Ints]
    most: float

    def spread(self, choice: Ints) -> Ints:
        """Assignments of the original problem: (L, N) -> (L, N)."""
        found = choice.copy()
        for hub, kept in self.left.items():
            found[:, hub] = kept[choice[:, hub]]
        return found


def narrowed(
    folded: Folded, max_table: int, solver: Callable[[Folded], _Solves]
) -> tuple[Narrowed, ...]:
    """`folded` without what is not worth it, for one range of objectives after the other.

    The last has no end. There is none where there are no hubs, or even their bounds ask for a table
    of more than `max_table` entries.
    """
    hubs = hubs_of(folded)
    bounds = HubBounds(folded, hubs, max_table) if hubs else None
    if bounds is None or bounds.too_wide:
        return ()
    extremes = ends(*folded.most)
    smallest = Objectives(extremes.time[1::2], extremes.memory[1::2])  # and with ties by time
    small = bounds.at(smallest)
    memory, with_time = (max(float(rows[i].min()) for rows in small) for i in (0, 1))
    if not (math.isfinite(memory) and 0 < memory < with_time):
        return ()
    weight = (with_time - memory) / smallest.time[1] / memory  # seconds of the smallest by bytes
    weights = np.append(0.0, weight * np.geomspace(1 / _SPAN, _SPAN, _WEIGHTS))
    other = bounds.at(Objectives(np.ones(len(weights)), weights), single=True)
    known = [np.concatenate((a, b[:1])) for a, b in zip(other, small, strict=True)]
    first = {  # without those of least memory, of which most are equal
        hub: np.unique(np.concatenate((a, b[1:])).argmin(axis=1))
        for hub, a, b in zip(hubs, other, small, strict=True)
    }
    tried = _restricted(folded, first)
    solves = solver(tried)
    if solves.too_wide:
        return ()
    rows = Objectives(np.append(np.ones(len(weights)), 0.0), np.append(weights, 1.0))
    prices = PriceList.of(tried)
    points = _points(prices, solves, (rows, extremes))
    # A sum of n terms in single precision is off by at most n roundings.
    margin = (len(prices.offset) + 4) * float(np.finfo(np.float32).eps)
    worth = [_worth(rows, table, points, margin) for table in known]
    for hub, mask in zip(hubs, worth, strict=True):
        mask[-1, first[hub]] = True  # where equals are left out, what they equal stays
    return tuple(
        Narrowed(_restricted(folded, left), left, most)
        for left, most in _ranges(hubs, worth, [*weights[1:].tolist(), math.inf])
    )


def _points(prices: PriceList, solver: _Solves, objectives: Sequence[Objectives]) -> Floats:
    """Seconds and bytes of some good assignments, the best under each objective: (P, 2)."""
    every = Objectives(
        np.concatenate([one.time for one in objectives]),
        np.concatenate([one.memory for one in objectives]),
    )
    _, choice = solver.minimise(every)
    entries = prices.entries_of(choice)
    time, memory = prices.time[entries].sum(axis=1), prices.memory[entries].sum(axis=1)
    front = reduce(np.array([0, len(time)]), time, memory)
    return np.stack([front.time, front.memory], axis=1)


def _worth(rows: Objectives, bounds: Rows, points: Floats, margin: float) -> Bools:
    """The choices that may cost less than all `points`, from one row to the next: (R - 1, K).

    `bounds` (R, K) are those of each choice at each row, off by no more than a `margin` of them.
    The first row is time, the last memory, and exact.
    """
    possible: Bools = np.asarray(np.isfinite(bounds).all(axis=0))
    found = np.tile(possible, (len(rows) - 1, 1))
    if not len(points):
        return found
    scale = np.append(np.ones(len(rows) - 1), rows.memory[-2])[:, None]  # one unit for all rows
    least = bounds[:, possible] * scale
    costs = np.outer(rows.time, points[:, 0]) + np.outer(rows.memory, points[:, 1])
    costs *= scale
    best = costs.min(axis=1, keepdims=True)
    may: Bools = np.less(least, best * (1 + margin))
    may[-1] = np.less(least[-1], best[-1])
    for place, ((low, high), (one, other)) in enumerate(
        zip(pairwise(least), pairwise(costs), strict=True)
    ):
        part = _ties(one, other)[:, None]
        reached = (one + part * (other - one)).min(axis=1, keepdims=True)
        beats = (low + part * (high - low) < reached * (1 + margin)).any(axis=0)
        found[place, possible] = beats | may[place] | may[place + 1]
    return found


def _ties(one: Floats, other: Floats) -> Floats:
    """How far from one row to the next two points cost the same, for every two that do."""
    before, after = np.subtract.outer(one, one), np.subtract.outer(other, other)
    crossing = before * after < 0
    found: Floats = np.unique(before[crossing] / (before[crossing] - after[crossing]))
    return found


def _ranges(
    hubs: Sequence[int], worth: Sequence[Bools], most: Sequence[float]
) -> Iterator[tuple[dict[int, Ints], float]]:
    """What is left of each hub's choices, and up to which weight: several rows where few are."""

    def combinations(masks: Sequence[Bools]) -> int:
        return math.prod(int(mask.sum()) for mask in masks)

    masks = [mask[0] for mask in worth]
    for place, end in enumerate(most[:-1]):
        wider = [mask | every[place + 1] for mask, every in zip(masks, worth, strict=True)]
        if combinations(wider) > max(_FEW, combinations(masks)):
            yield {h: np.flatnonzero(mask) for h, mask in zip(hubs, masks, strict=True)}, end
            wider = [every[place + 1] for every in worth]
        masks = wider
    yield {h: np.flatnonzero(mask) for h, mask in zip(hubs, masks, strict=True)}, most[-1]


def _restricted(folded: Folded, left: Mapping[int, Ints]) -> Folded:
    """The problem in which some nodes have only the choices that are `left`."""
    known: dict[tuple[int, ...], tuple[Floats, Ints]] = {}  # equal tables stay one

    def taken(part: Node | Edge, nodes: Sequence[int]) -> tuple[Floats, Ints]:
        if not any(node in left for node in nodes):
            return part.time, part.memory
        key = (id(part.time), id(part.memory), *(node if node in left else -1 for node in nodes))
        if key not in known:
            time, memory = part.time, part.memory
            for axis, node in enumerate(nodes):
                if node in left:
                    time, memory = time.take(left[node], axis), memory.take(left[node], axis)
            known[key] = time, memory
        return known[key]

    nodes = [Node(n.name, *taken(n, (i,))) for i, n in enumerate(folded.problem.nodes)]
    edges = [Edge(e.tail, e.head, *taken(e, (e.tail, e.head))) for e in folded.problem.edges]
    return Folded(Problem.unchecked(nodes, edges), folded.runs)
