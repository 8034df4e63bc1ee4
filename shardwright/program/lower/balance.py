"""Cuts a graph into stages of about equal work with small interfaces.

First, bisection over greedy cuts finds the smallest possible work of the busiest stage. Then, among
all cuts whose busiest stage has at most the fraction `_SLACK` more, dynamic programming over the
last cut with a sliding minimum finds those crossed by the fewest bytes. O(stages · operators).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import prod

from shardwright.ir.graph import Graph
from shardwright.program.liveness import Liveness
from shardwright.program.lower.stages import StageError
from shardwright.rules.analysis import Analysis

_NOWHERE = 1 << 62
_SLACK = 0.1  # how much more work than the least possible maximum a stage may have


def operator_work(graph: Graph, analysis: Analysis) -> tuple[int, ...]:
    """Arithmetic of each operator's forward pass: its contraction, and one for each result."""
    found = []
    for op in graph.ops:
        rule = analysis.rules[op.name]
        sizes = {factor.name: factor.size for factor in rule.factors}
        contraction = 2 * rule.work_repeats * prod(sizes[f] for f in rule.work) if rule.work else 0
        found.append(contraction + sum(graph.tensor[name].num_elements for name in op.outputs))
    return tuple(found)


def balanced_cuts(graph: Graph, stages: int, work: Sequence[int]) -> tuple[int, ...]:
    """Cuts into `stages` of balanced `work`, a number per operator, each with its own parameters.

    Raises `StageError`, with the most stages there can be, if there are too few
    places to cut.
    """
    if stages < 1:
        raise StageError(f"{stages} stages were asked for; ask for at least 1")
    board = _Board(graph, work)
    if (most := board.most_stages()) < stages:
        raise StageError(
            f"{stages} stages were asked for, but this model can be cut into at most {most} that"
            f" have parameters of their own; ask for {most} or fewer"
        )
    low, high = max(work, default=0), board.total
    while low < high:
        middle = (low + high) // 2
        if board.cuts(stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = board.cuts(stages, int(low * (1 + _SLACK)))
    assert found is not None
    return found


class _Board:
    """Running sums along the operators, and the cheapest cuts under a limit of work."""

    def __init__(self, graph: Graph, work: Sequence[int]) -> None:
        self.end = len(graph.ops)
        liveness = Liveness(graph)
        self.bytes = liveness.crossing_bytes()
        self.work = (0, *accumulate(work))
        self.births = (0, *accumulate(liveness.trained_births()))
        self.total = self.work[-1]

    def most_stages(self) -> int:
        """The number of stages of greedy cutting, each as short as it can be."""
        count, owned = 0, 0
        for position in range(1, self.end + 1):
            allowed = position == self.end or self.bytes[position] >= 0
            if allowed and self.births[position] > owned:
                count, owned = count + 1, self.births[position]
        return count

    def cuts(self, stages: int, limit: int) -> tuple[int, ...] | None:
        """The cuts that hand on the fewest bytes with at most `limit` work a stage, or None."""
        cost = [_NOWHERE] * (self.end + 1)  # of the best cuts whose last one is here
        cost[0] = 0
        before: list[list[int]] = []
        for stage in range(stages):
            cost, best = self.extend(cost, limit, last=stage == stages - 1)
            before.append(best)
        if cost[self.end] >= _NOWHERE:
            return None
        found = [self.end]
        for best in reversed(before):
            found.append(best[found[-1]])
        return tuple(found[-2:0:-1])

    def extend(self, cost: list[int], limit: int, *, last: bool) -> tuple[list[int], list[int]]:
        """Costs with one stage more, and per position where that stage starts."""
        longer, best = [_NOWHERE] * (self.end + 1), [-1] * (self.end + 1)
        window: deque[int] = deque()  # starts that may be best yet, cheapest first
        entering = 0
        for position in range(1, self.end + 1):
            while entering < position and self.births[entering] < self.births[position]:
                while window and cost[window[-1]] >= cost[entering]:
                    window.pop()
                window.append(entering)
                entering += 1
            while window and self.work[position] - self.work[window[0]] > limit:
                window.popleft()
            here = 0 if position == self.end else self.bytes[position]
            if (
                window
                and here >= 0
                and cost[window[0]] < _NOWHERE
                and last == (position == self.end)
            ):
                longer[position], best[position] = cost[window[0]] + here, window[0]
        return longer, best
