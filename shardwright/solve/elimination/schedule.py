"""The elimination order of a graph, as a list of joins for any semiring.

Paper: TensorOpt / FT (arXiv 2004.10856), node, edge and branch elimination; in general bucket
elimination (Dechter 1999). Eliminating a node joins all tables that mention it and takes the best
of its choices; a leaf, a chain node and an irreducible core differ only in how many neighbours
the result still mentions. Where a result would exceed `max_table` entries the busiest node is
pinned (FT's heuristic elimination).
Deviation: nodes are taken by the size of the table that each leaves, to a power of two, and among
equals in rounds (a node next to one just eliminated waits), and equal joins of equal tables are
one join. Repeated layers therefore cost little more than one, which is TAPAS' folding
(arXiv 2302.00247) without searching for repeats.
Complexity: O(N log N) for N nodes of bounded degree.
Oracle: none of its own; `tests/property/test_search_laws.py` compares both users with enumeration.
Known inefficiency: the greedy order does not minimise the total work, and a join of equal tables in
another order of nodes is not recognised as equal.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from shardwright.solve.elimination.problem import Edge, Floats, Ints, Node, Problem

NOTHING: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class InputTable(NamedTuple):
    """A cost table of the problem; `pinned[i]` is the pinned node of axis i, or None."""

    time: Floats
    memory: Ints
    pinned: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes that are left."""
        axes = zip(self.time.shape, self.pinned, strict=True)
        return tuple(size for size, pin in axes if pin is None)


class ExternalTable(NamedTuple):
    """A table that the caller passes along with the objectives, as number `number`."""

    shape: tuple[int, ...]
    number: int


class Join(NamedTuple):
    """A table computed from others: their product, minimised over the last axis if `eliminates`.

    `sizes` are the joint axes, the eliminated one last. Input i is table `inputs[i][0]`, whose
    axes are the joint axes `inputs[i][1]`.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    eliminates: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes that are left."""
        return self.sizes[:-1] if self.eliminates else self.sizes

    @property
    def axes(self) -> Ints:
        """The index along each joint axis of every joint cell: (axes, joint cells)."""
        return np.indices(self.sizes).reshape(len(self.sizes), math.prod(self.sizes))

    def cells(self, position: int, axes: Ints, shape: Sequence[int]) -> Ints:
        """The cell of the input at `position`, whose table has this shape, for every joint cell.

        `axes` is the property of this name, which callers compute once.
        """
        _, own = self.inputs[position]
        index = np.zeros(axes.shape[1], np.int64)
        for axis, size in zip(own, shape, strict=True):
            index = index * size + axes[axis]
        return index


class ScopedTable(NamedTuple):
    """A table in the graph: axis i of table `table` is node `scope[i]`."""

    scope: tuple[int, ...]
    table: int


class EliminationStep(NamedTuple):
    """Factors `inputs` become factor `output`; `node` is eliminated, unless it is None."""

    node: int | None
    inputs: tuple[int, ...]
    output: int


class Leaves(NamedTuple):
    """The cost tables of a schedule, end to end; forbidden entries have time 0."""

    time: Floats  # (entries,)
    memory: Floats  # (entries,)
    forbidden: Ints  # entries
    begin: dict[int, int]  # table -> its first entry


@dataclass(frozen=True, eq=False)
class EliminationSchedule:
    """A plan of elimination: the distinct tables to compute, and their scopes in the graph."""

    tables: tuple[InputTable | ExternalTable | Join, ...]  # each after those it needs
    factors: tuple[ScopedTable, ...]
    steps: tuple[EliminationStep, ...]
    root: int  # the factor that holds the answer; its scope is that of the kept nodes
    pinned: tuple[int, ...]
    known: dict[object, int]  # inputs of a table -> the table

    @cached_property
    def leaves(self) -> Leaves:
        """All cost tables, for weighing at once."""
        leaves = {i: table for i, table in enumerate(self.tables) if isinstance(table, InputTable)}
        sizes = [leaf.time.size for leaf in leaves.values()]
        time = np.concatenate([leaf.time.ravel() for leaf in leaves.values()])
        memory = np.concatenate([leaf.memory.ravel() for leaf in leaves.values()])
        forbidden = np.flatnonzero(np.isinf(time))
        time[forbidden] = 0.0
        begin = dict(zip(leaves, np.cumsum([0, *sizes]).tolist(), strict=False))
        return Leaves(time, memory.astype(np.float64), forbidden, begin)

    def unroll(self, traces: Sequence[Sequence[Ints]], count: int, num_nodes: int) -> Ints:
        """Follow the traces of all steps back from `count` points of the root.

        A trace has for each point the index in each input, and last, if a node was eliminated, that
        node's choice. Returns choices (count, num_nodes); those of pinned nodes are 0.
        """
        position = {self.root: np.arange(count)}  # factor -> the points it contributes
        choice = np.zeros((count, num_nodes), np.int64)
        for step, trace in zip(reversed(self.steps), reversed(traces), strict=True):
            points = position.pop(step.output)
            for number, row in zip(step.inputs, trace, strict=False):
                position[number] = row[points]
            if step.node is not None:
                choice[:, step.node] = trace[-1][points]
        return choice


def make_schedule(
    problem: Problem,
    max_table: int,
    kept: Sequence[int] = (),
    given: Mapping[int, tuple[int, ...]] = NOTHING,
    after: EliminationSchedule | None = None,
    pins: Sequence[int] = (),
) -> EliminationSchedule:
    """Schedule the elimination of every node, with no new table above `max_table` entries.

    * `kept`: nodes that are not eliminated;
    * `given`: the scopes of further tables, by the numbers under which the caller passes them.
      Those over a pinned node are left out: the caller must check `pinned`;
    * `after`: a schedule whose tables this one begins with, and reuses where equal;
    * `pins`: nodes that are pinned in any case.
    """
    neighbours: list[set[int]] = [set() for _ in problem.nodes]
    scopes = [(edge.tail, edge.head) for edge in problem.edges]
    for scope in (*scopes, *given.values()):
        for node in scope:
            neighbours[node].update(scope)
            neighbours[node].discard(node)
    order, pinned = elimination_order(neighbours, problem.sizes, max_table, kept, pins)
    given = {number: scope for number, scope in given.items() if not {*scope} & {*pinned}}
    return _Builder(problem, frozenset(pinned), after).build(order, given, tuple(sorted(kept)))


def elimination_order(
    neighbours: Sequence[Iterable[int]],
    sizes: Sequence[int],
    max_table: int,
    kept: Sequence[int] = (),
    pins: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """The nodes in order of elimination, and the nodes to pin before, which include `pins`.

    >>> elimination_order([{1}, {0, 2}, {1}], [9, 9, 9], 81)
    ([0, 2, 1], [])
    """
    graph = [set(near) for near in neighbours]
    generation = [0] * len(graph)
    remaining = set(range(len(graph))) - set(kept)
    order: list[int] = []
    pinned = list(pins)

    def table_size(node: int) -> int:
        return math.prod(sizes[other] for other in graph[node])

    widths = [max(2, size) for size in sizes]  # an axis of size 1 is not free either

    def rank(node: int) -> tuple[int, int]:
        size = 1
        for other in graph[node]:
            size *= widths[other]
        return size.bit_length(), generation[node]

    queue = [(rank(node), node) for node in remaining]
    heapq.heapify(queue)

    def remove(node: int, fill: bool) -> None:
        remaining.remove(node)
        for other in graph[node]:
            if fill:
                graph[other] |= graph[node]
                generation[other] = max(generation[other], generation[node] + 1)
            graph[other] -= {node, other}
            if other in remaining:
                heapq.heappush(queue, (rank(other), other))

    for pin in pins:
        remove(pin, fill=False)
    while remaining:
        known, node = heapq.heappop(queue)
        if node not in remaining or known != rank(node):
            continue  # its neighbours changed, and it was pushed again
        if table_size(node) > max_table:
            heapq.heappush(queue, (known, node))
            node = min(remaining, key=lambda n: (table_size(n), n))
        if table_size(node) > max_table:
            node = max(remaining, key=lambda n: (len(graph[n]), -n))
            pinned.append(node)
            remove(node, fill=False)
        else:
            order.append(node)
            remove(node, fill=True)
    return order, sorted(pinned)


class _Builder:
    """Builds a schedule in which equal computations are one table."""

    def __init__(
        self, problem: Problem, pinned: frozenset[int], after: EliminationSchedule | None
    ) -> None:
        self.problem = problem
        self.sizes = problem.sizes
        self.pinned = pinned
        self.tables: list[InputTable | ExternalTable | Join] = list(after.tables) if after else []
        self.factors: list[ScopedTable] = []
        self.steps: list[EliminationStep] = []
        self.known: dict[object, int] = dict(after.known) if after else {}
        self.live: dict[int, set[int]] = defaultdict(set)  # node -> factors that mention it
        self.constants: list[int] = []  # factors of empty scope

    def build(
        self, order: Sequence[int], given: Mapping[int, tuple[int, ...]], kept: tuple[int, ...]
    ) -> EliminationSchedule:
        """The schedule that eliminates nodes in `order`, until the nodes `kept` are left."""
        for number, node in enumerate(self.problem.nodes):
            self._add_leaf(node, (number,))
        for edge in self.problem.edges:
            self._add_leaf(edge, (edge.tail, edge.head))
        for number, scope in given.items():
            table = ExternalTable(tuple(self.sizes[node] for node in scope), number)
            self._add_factor(scope, table, table)
        for number in order:
            self._eliminate(number)
        left = sorted({*self.constants, *(f for node in kept for f in self.live[node])})
        root = left[0]
        if len(left) > 1 or self.factors[root].scope != kept:
            root = self._join(tuple(left), None, kept)
        return EliminationSchedule(
            tuple(self.tables),
            tuple(self.factors),
            tuple(self.steps),
            root,
            tuple(sorted(self.pinned)),
            self.known,
        )

    def _eliminate(self, node: int) -> None:
        groups: list[list[int]] = []  # each opens with a factor whose scope covers the others
        for factor in sorted(self.live[node], key=lambda f: (-len(self.factors[f].scope), f)):
            scope = set(self.factors[factor].scope)
            for group in groups:
                if scope <= set(self.factors[group[0]].scope):
                    group.append(factor)
                    break
            else:
                groups.append([factor])
        # Edge elimination first: parallel tables multiply where they are still small.
        inputs = [g[0] if len(g) == 1 else self._join(tuple(sorted(g)), None) for g in groups]
        self._join(tuple(sorted(inputs)), node)

    def _join(
        self, inputs: tuple[int, ...], node: int | None, scope: Sequence[int] | None = None
    ) -> int:
        """Replace `inputs` by one factor; its last axis is its longest, unless `scope` is given."""
        factors = [self.factors[number] for number in inputs]
        if scope is None:
            free = {n for factor in factors for n in factor.scope} - {node}
            scope = sorted(free, key=lambda n: (self.sizes[n], n))
        joint = scope if node is None else [*scope, node]
        axis = {n: i for i, n in enumerate(joint)}
        join = Join(
            tuple([self.sizes[n] for n in joint]),
            tuple([(f.table, tuple([axis[n] for n in f.scope])) for f in factors]),
            node is not None,
        )
        for number in inputs:
            for n in self.factors[number].scope:
                self.live[n].discard(number)
        output = self._add_factor(tuple(scope), join, join)
        self.steps.append(EliminationStep(node, inputs, output))
        return output

    def _add_leaf(self, part: Node | Edge, ends: tuple[int, ...]) -> None:
        pinned = tuple(end if end in self.pinned else None for end in ends)
        scope = tuple(end for end in ends if end not in self.pinned)
        leaf = InputTable(part.time, part.memory, pinned)
        self._add_factor(scope, leaf, (id(part.time), id(part.memory), pinned))

    def _add_factor(
        self, scope: tuple[int, ...], table: InputTable | ExternalTable | Join, key: object
    ) -> int:
        position = self.known.setdefault(key, len(self.tables))
        if position == len(self.tables):
            self.tables.append(table)
        number = len(self.factors)
        self.factors.append(ScopedTable(scope, position))
        for node in scope:
            self.live[node].add(number)
        if not scope:
            self.constants.append(number)
        return number
