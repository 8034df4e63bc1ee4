"""Folds the search problem of a graph along the graph's repeats.

It uses only nodes, edges and the operators to which nodes belong, not costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwright.planner.space.repeats import Repeat
from shardwright.solve.elimination.problem import Edge, Problem
from shardwright.solve.folding.folded import Folded, FoldedChain


def fold(
    problem: Problem,
    owners: Sequence[frozenset[int]],
    repeats: Sequence[Repeat],
    skipped: Sequence[int],
) -> Folded | None:
    """`problem` in which the second copy of each of `repeats` counts `1 + skipped` times.

    `owners` are the operators to which each node belongs. Returns None if a repeat has several
    entry or exit nodes, or if these two differ.
    """
    runs = []
    for repeat, left_out in zip(repeats, skipped, strict=True):
        run = _run(problem, owners, repeat, left_out + 1)
        if run is None:
            return None
        runs.append(run)
    return Folded(problem, tuple(runs))


def _run(
    problem: Problem, owners: Sequence[frozenset[int]], repeat: Repeat, count: int
) -> FoldedChain | None:
    """The chain that `count` copies of a repeat form; None where copies differ at their borders."""

    def members(copy: int) -> set[int]:
        span = repeat.copy(copy)
        return {i for i, owner in enumerate(owners) if owner and all(op in span for op in owner)}

    before, own, after = (members(copy) for copy in range(3))
    towards: dict[int, list[int]] = {}  # nodes outside -> edges to own nodes
    for number, edge in enumerate(problem.edges):
        if (edge.tail in own) != (edge.head in own):
            outside = edge.head if edge.tail in own else edge.tail
            towards.setdefault(outside, []).append(number)
    touches_last = {
        end
        for edge in problem.edges
        for end, other in ((edge.tail, edge.head), (edge.head, edge.tail))
        if other in after
    }
    entries = {node for node in towards if node in before and node not in touches_last}
    leaving = {e for node in towards if node in after for e in towards[node]}
    exits = {_inside(problem.edges[e], own) for e in leaving}
    if len(entries) != 1 or len(exits) != 1:
        return None
    entry, leave = entries.pop(), exits.pop()
    shifted = {op + repeat.period for op in owners[entry]}
    equal_choices = problem.nodes[entry].num_choices == problem.nodes[leave].num_choices
    if owners[leave] != shifted or not equal_choices:
        return None
    arriving = Counter(_table(problem.edges[e]) for e in towards[entry])
    if arriving != Counter(_table(problem.edges[e]) for e in leaving):
        return None
    return FoldedChain(tuple(sorted(own)), entry, leave, count, frozenset(leaving))


def _inside(edge: Edge, own: set[int]) -> int:
    return edge.tail if edge.tail in own else edge.head


def _table(edge: Edge) -> tuple[int, int]:
    return id(edge.time), id(edge.memory)
