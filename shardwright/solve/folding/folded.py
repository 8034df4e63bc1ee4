"""A folded search problem: a segment that repeats many times in a row.

Paper: TAPAS (arXiv 2302.00247), folding.
Deviation: the copies are not forced to be equal. Every copy has choices of its own.
Oracle: `Folded.unfolded`, the same problem written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwright.solve.elimination.problem import (
    Assignment,
    Edge,
    Ints,
    Node,
    Problem,
    ProblemError,
    most,
)


@dataclass(frozen=True, slots=True)
class FoldedChain:
    """Nodes of the problem that represent several copies of themselves in a chain.

    Attributes:
        nodes: the nodes.
        entry: the node before the first copy.
        exit: the node of `nodes` that is to the next copy what `entry` is to the first.
        count: the number of copies.
        after: the numbers of the edges from `exit` that exist only for the last copy. Edges from
            other nodes outside exist for every copy.
    """

    nodes: tuple[int, ...]
    entry: int
    exit: int
    count: int
    after: frozenset[int]


@dataclass(frozen=True, eq=False)
class Folded:
    """`problem`, in which every run represents `count` copies.

    A whole assignment has the nodes of `problem` first, in which a run's nodes are its last copy,
    then, run by run, the earlier copies.
    """

    problem: Problem
    runs: tuple[FoldedChain, ...] = ()

    def __post_init__(self) -> None:
        taken: set[int] = set()
        for run in self.runs:
            if run.exit not in run.nodes or run.entry in run.nodes or taken & set(run.nodes):
                raise ProblemError(f"run {run} must hold its exit, not its entry, and no other's")
            if self.problem.sizes[run.entry] != self.problem.sizes[run.exit]:
                raise ProblemError(
                    f"entry and exit of a run have {self.problem.sizes[run.entry]} and"
                    f" {self.problem.sizes[run.exit]} choices; they must be equally many"
                )
            taken |= set(run.nodes)

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole problem."""
        return len(self.problem.nodes) + sum(len(r.nodes) * (r.count - 1) for r in self.runs)

    @classmethod
    def of(cls, problem: Problem | Folded) -> Folded:
        """`problem` as a folded one without runs; a folded problem is returned as it is."""
        return problem if isinstance(problem, Folded) else cls(problem)

    @property
    def most(self) -> tuple[float, int]:
        """Upper bounds of seconds and bytes over all whole assignments."""
        time, memory = most(self.problem)
        count = max((run.count for run in self.runs), default=1)
        return count * time, count * memory

    @property
    def widest(self) -> int:
        """Entries of the largest table over the entry, the exit and the shared inputs of a run."""
        return max((self._entries(run) for run in self.runs), default=1)

    def _entries(self, run: FoldedChain) -> int:
        edges = [self.problem.edges[e] for e in self.inner_edges(run)]
        outside = {end for edge in edges for end in (edge.tail, edge.head)} - set(run.nodes)
        return math.prod(self.problem.sizes[node] for node in outside | {run.entry, run.exit})

    def positions(self, number: int) -> Ints:
        """The indices of a run's nodes in a whole assignment: (copies, nodes)."""
        begin = len(self.problem.nodes)
        begin += sum(len(run.nodes) * (run.count - 1) for run in self.runs[:number])
        run = self.runs[number]
        before = begin + np.arange(len(run.nodes) * (run.count - 1))
        return np.concatenate((before.reshape(-1, len(run.nodes)), np.array([run.nodes])))

    def node_tables(self) -> Ints:
        """For every node of the whole problem, the node of `problem` with its costs."""
        copies = (np.tile(np.array(run.nodes), run.count - 1) for run in self.runs)
        own = np.arange(len(self.problem.nodes))
        return np.concatenate((own, *copies)).astype(np.int64)

    def expand(self, assignment: Sequence[int]) -> Assignment:
        """The whole assignment in which all copies of a run make equal choices."""
        return tuple(np.array(assignment)[self.node_tables()].tolist())

    def edge_ends(self) -> tuple[Ints, Ints, Ints]:
        """For every edge of the whole problem: its edge in `problem`, its tail and its head."""
        return self._edge_ends

    @cached_property
    def _edge_ends(self) -> tuple[Ints, Ints, Ints]:
        """For every edge of the whole problem its table, tail and head."""
        edges = self.problem.edges
        table = [np.arange(len(edges))]
        tail = [np.array([edge.tail for edge in edges], np.int64)]
        head = [np.array([edge.head for edge in edges], np.int64)]
        for number, run in enumerate(self.runs):
            positions = self.positions(number)
            own = np.array(self.inner_edges(run), np.int64)
            at = {node: i for i, node in enumerate(run.nodes)}
            exits = np.concatenate(([run.entry], positions[:-1, at[run.exit]]))

            def end(
                nodes: Ints,
                run: FoldedChain = run,
                positions: Ints = positions,
                exits: Ints = exits,
            ) -> Ints:
                found = np.tile(nodes, (run.count, 1))
                for i, node in enumerate(run.nodes):
                    found[:, nodes == node] = positions[:, i : i + 1]
                found[:, nodes == run.entry] = exits[:, None]
                return found

            tails, heads = end(tail[0][own]), end(head[0][own])
            tail[0][own], head[0][own] = tails[-1], heads[-1]
            table.append(np.tile(own, run.count - 1))
            tail.append(tails[:-1].ravel())
            head.append(heads[:-1].ravel())
        return np.concatenate(table), np.concatenate(tail), np.concatenate(head)

    def inner_edges(self, run: FoldedChain) -> list[int]:
        """The numbers of the edges of `problem` that exist in every copy of a run."""
        inside = set(run.nodes)
        return [
            number
            for number, edge in enumerate(self.problem.edges)
            if (edge.tail in inside or edge.head in inside) and number not in run.after
        ]

    def unfolded(self) -> Problem:
        """The whole problem, written out."""
        if not self.runs:
            return self.problem
        nodes = [self.problem.nodes[i] for i in self.node_tables()]
        ends = zip(*(column.tolist() for column in self.edge_ends()), strict=True)
        edges = [
            Edge(tail, head, self.problem.edges[e].time, self.problem.edges[e].memory)
            for e, tail, head in ends
        ]
        return Problem.unchecked(nodes, edges)

    def template(self, run: FoldedChain) -> tuple[Problem, tuple[int, ...], tuple[int, ...]]:
        """One copy of a run as a problem, its nodes' numbers, and its nodes to keep.

        Kept are entry, exit and the nodes outside with edges into the run; only nodes of the run
        have costs.
        """
        inner = [self.problem.edges[e] for e in self.inner_edges(run)]
        outside = {end for edge in inner for end in (edge.tail, edge.head)} - set(run.nodes)
        shared_inputs = sorted(outside - {run.entry})
        numbers = (run.entry, run.exit, *shared_inputs, *(n for n in run.nodes if n != run.exit))
        at = {node: i for i, node in enumerate(numbers)}
        free = outside | {run.entry}
        nodes = tuple(_without_cost(n) if i in free else n for i, n in self._numbered(numbers))
        edges = tuple(Edge(at[e.tail], at[e.head], e.time, e.memory) for e in inner)
        return Problem.unchecked(nodes, edges), numbers, tuple(range(2 + len(shared_inputs)))

    def outer(self) -> tuple[Problem, tuple[int, ...]]:
        """The problem without the insides of runs, and its nodes' numbers; exits cost nothing."""
        inside = {node for run in self.runs for node in run.nodes if node != run.exit}
        exits = {run.exit for run in self.runs}
        numbers = tuple(i for i in range(len(self.problem.nodes)) if i not in inside)
        at = {node: i for i, node in enumerate(numbers)}
        nodes = tuple(_without_cost(n) if i in exits else n for i, n in self._numbered(numbers))
        inner = {e for run in self.runs for e in self.inner_edges(run)}
        edges = tuple(
            Edge(at[e.tail], at[e.head], e.time, e.memory)
            for number, e in enumerate(self.problem.edges)
            if number not in inner
        )
        return Problem.unchecked(nodes, edges), numbers

    def _numbered(self, numbers: Sequence[int]) -> Iterator[tuple[int, Node]]:
        return ((i, self.problem.nodes[i]) for i in numbers)


def _without_cost(node: Node) -> Node:
    size = node.num_choices
    return Node(node.name, np.zeros(size), np.zeros(size, np.int64))
