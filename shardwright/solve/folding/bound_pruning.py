"""Prunes choices of shared inputs by bounds before a problem is solved.

Every layer of a decoder reads a mask and the output of an encoder. Tables over both and over the
input and output of a layer are nearly all the work, although at any one weight only one or two
layouts of each are competitive. For a range of weights of time and memory, a choice is pruned where
its lower bound (`shared_inputs.py`) exceeds the cost of a known assignment. The minimum of every
objective is unchanged.

Both are known at a few weights only. As functions of the weights both are minima of linear
functions, hence concave: the bound lies above its chords; the cost of the known assignments is
furthest above a chord where two of them tie. There the two are compared.

Paper: variable fixing by reduced costs, as for integer programs.
Complexity: a few eliminations over one shared input each.
Oracle: the same problem, not pruned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import numpy as np

from shardwright.solve.algebra.frontier import reduce
from shardwright.solve.algebra.minplus import Objectives, Rows, extreme_objectives
from shardwright.solve.elimination.pricing import PriceList
from shardwright.solve.elimination.problem import Bools, Edge, Floats, Ints, Node, Problem
from shardwright.solve.folding.folded import Folded
from shardwright.solve.folding.shared_inputs import SharedInputBounds, shared_inputs_of

_WEIGHTS, _SPAN = 7, 30.0  # at which bounds are known, around time over memory of the smallest
_FEW = 150  # combinations of choices below which ranges are united


class _Solves(Protocol):
    """The part of `Solver` that pruning uses."""

    too_wide: bool

    def minimise(self, objectives: Objectives) -> tuple[Rows, Ints]: ...


@final
@dataclass(frozen=True, eq=False)
class PrunedProblem:
    """A problem with pruned choices, for objectives of at most `most` seconds per byte.

    `left` are the remaining choices of each shared input.
    """

    folded: Folded
    left: Mapping[int, Ints]
    most: float

    def expand(self, choice: Ints) -> Ints:
        """Assignments of the original problem: (L, N) -> (L, N)."""
        found = choice.copy()
        for shared_input, kept in self.left.items():
            found[:, shared_input] = kept[choice[:, shared_input]]
        return found


def pruned_by_bounds(
    folded: Folded, max_table: int, solver: Callable[[Folded], _Solves]
) -> tuple[PrunedProblem, ...]:
    """`folded` with pruned choices, once for each range of objectives; the last range is unbounded.

    Empty where there are no shared inputs, or where even their bounds need a table of more than
    `max_table` entries.
    """
    shared_inputs = shared_inputs_of(folded)
    bounds = SharedInputBounds(folded, shared_inputs, max_table) if shared_inputs else None
    if bounds is None or bounds.too_wide:
        return ()
    extremes = extreme_objectives(*folded.most)
    smallest = Objectives(extremes.time[1::2], extremes.memory[1::2])  # and with ties by time
    small = bounds.at(smallest)
    memory, with_time = (max(float(rows[i].min()) for rows in small) for i in (0, 1))
    if not (math.isfinite(memory) and 0 < memory < with_time):
        return ()
    weight = (with_time - memory) / smallest.time[1] / memory  # seconds of the smallest by bytes
    weights = np.append(0.0, weight * np.geomspace(1 / _SPAN, _SPAN, _WEIGHTS))
    other = bounds.at(Objectives(np.ones(len(weights)), weights), single=True)
    known = [np.concatenate((a, b[:1])) for a, b in zip(other, small, strict=True)]
    first = {  # without the choices of least memory, most of which are equal
        shared_input: np.unique(np.concatenate((a, b[1:])).argmin(axis=1))
        for shared_input, a, b in zip(shared_inputs, other, small, strict=True)
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
    candidates = [_candidates(rows, table, points, margin) for table in known]
    for shared_input, mask in zip(shared_inputs, candidates, strict=True):
        mask[-1, first[shared_input]] = True  # one of the equal choices stays
    return tuple(
        PrunedProblem(_restricted(folded, left), left, most)
        for left, most in _ranges(shared_inputs, candidates, [*weights[1:].tolist(), math.inf])
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


def _candidates(rows: Objectives, bounds: Rows, points: Floats, margin: float) -> Bools:
    """The choices that may cost less than all `points`, between each two rows: (R - 1, K).

    `bounds` (R, K) are the bounds of each choice at each row, with a relative error of at most
    `margin`. The first row is time, the last memory, and exact.
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
    for position, ((low, high), (one, other)) in enumerate(
        zip(pairwise(least), pairwise(costs), strict=True)
    ):
        part = _ties(one, other)[:, None]
        reached = (one + part * (other - one)).min(axis=1, keepdims=True)
        beats = (low + part * (high - low) < reached * (1 + margin)).any(axis=0)
        found[position, possible] = beats | may[position] | may[position + 1]
    return found


def _ties(one: Floats, other: Floats) -> Floats:
    """The fractions between two rows at which two points cost the same, for every such pair."""
    before, after = np.subtract.outer(one, one), np.subtract.outer(other, other)
    crossing = before * after < 0
    found: Floats = np.unique(before[crossing] / (before[crossing] - after[crossing]))
    return found


def _ranges(
    shared_inputs: Sequence[int], candidates: Sequence[Bools], most: Sequence[float]
) -> Iterator[tuple[dict[int, Ints], float]]:
    """The remaining choices of each shared input, and the end of their range of weights."""

    def combinations(masks: Sequence[Bools]) -> int:
        return math.prod(int(mask.sum()) for mask in masks)

    masks = [mask[0] for mask in candidates]
    for position, end in enumerate(most[:-1]):
        wider = [mask | every[position + 1] for mask, every in zip(masks, candidates, strict=True)]
        if combinations(wider) > max(_FEW, combinations(masks)):
            yield (
                {h: np.flatnonzero(mask) for h, mask in zip(shared_inputs, masks, strict=True)},
                end,
            )
            wider = [every[position + 1] for every in candidates]
        masks = wider
    yield {h: np.flatnonzero(mask) for h, mask in zip(shared_inputs, masks, strict=True)}, most[-1]


def _restricted(folded: Folded, left: Mapping[int, Ints]) -> Folded:
    """The problem with the choices of some nodes restricted to `left`."""
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
