"""The search problem: nodes with choices, edges between them, and costs of assignments.

It is independent of where the costs come from: time is in seconds, memory in bytes, and both add up
over nodes and edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Assignment = tuple[int, ...]  # the choice of every node, in node order

LARGEST_MEMORY = 2**53  # the search weighs memory in float64, which counts exactly up to here


class ProblemError(ValueError):
    """A search problem with invalid costs or edges."""


class Point(NamedTuple):
    """An assignment and its price."""

    time: float  # seconds
    memory: int  # bytes
    choice: Assignment


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One decision among K choices, `time[k]` seconds and `memory[k]` bytes each.

    An infinite time forbids the choice. The arrays become read-only. An array of the right type is
    not copied: nodes and edges with equal costs should share one.
    """

    name: str
    time: Floats  # (K,)
    memory: Ints  # (K,)

    def __post_init__(self) -> None:
        if not _is_table(self.time, self.memory):
            time, memory = f"time of node {self.name!r}", f"memory of {self.name!r}"
            object.__setattr__(self, "time", _frozen(self.time, "f", time))
            object.__setattr__(self, "memory", _frozen(self.memory, "i", memory))
        if self.time.ndim != 1 or self.time.shape != self.memory.shape or not self.time.size:
            raise ProblemError(
                f"node {self.name!r} has time of shape {self.time.shape} and memory of shape "
                f"{self.memory.shape}; both must be one row with an entry for each choice"
            )

    @property
    def num_choices(self) -> int:
        return self.time.size


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The joint cost of two decisions: `time[i, j]` where tail takes i and head takes j."""

    tail: int
    head: int
    time: Floats  # (K of tail, K of head)
    memory: Ints  # (K of tail, K of head)

    def __post_init__(self) -> None:
        if not _is_table(self.time, self.memory):
            where = f"edge {self.tail} -> {self.head}"
            object.__setattr__(self, "time", _frozen(self.time, "f", f"time of {where}"))
            object.__setattr__(self, "memory", _frozen(self.memory, "i", f"memory of {where}"))
        if self.time.ndim != 2 or self.time.shape != self.memory.shape:
            raise ProblemError(
                f"edge {self.tail} -> {self.head} has time of shape {self.time.shape} and memory of"
                f" shape {self.memory.shape}; both must be (choices of tail, choices of head)"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A choice for every node is to be made; the price is the sum over all nodes and edges.

    Invariants, checked on construction:
      * at least one node; every edge joins two different nodes and fits their numbers of choices;
      * no negative or NaN cost (an infinite time forbids, memory is always finite);
      * no assignment reaches `LARGEST_MEMORY` bytes.

    Several edges may join the same two nodes, and the graph need not be connected.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "edges", tuple(self.edges))
        if not self.nodes:
            raise ProblemError("a problem needs at least one node")
        for edge in self.edges:
            self._check_ends(edge)
        checked: set[tuple[int, int]] = set()  # tables are shared, and checked once
        for part in self.parts:
            if (key := (id(part.time), id(part.memory))) not in checked:
                checked.add(key)
                _check_costs(part)
        _, memory = most(self)
        if memory >= LARGEST_MEMORY:
            raise ProblemError(f"memory may reach {memory} bytes, at most {LARGEST_MEMORY} will do")

    @classmethod
    def unchecked(cls, nodes: Iterable[Node], edges: Iterable[Edge]) -> Problem:
        """A problem derived from a valid one, whose costs need no check."""
        found = object.__new__(cls)
        object.__setattr__(found, "nodes", tuple(nodes))
        object.__setattr__(found, "edges", tuple(edges))
        return found

    def _check_ends(self, edge: Edge) -> None:
        num, where = len(self.nodes), f"edge {edge.tail} -> {edge.head}"
        if not (0 <= edge.tail < num and 0 <= edge.head < num):
            raise ProblemError(f"{where} leaves the problem, whose nodes are 0 to {num - 1}")
        if edge.tail == edge.head:
            raise ProblemError(f"{where} is a loop; add its diagonal to the node's own cost")
        tail, head = self.nodes[edge.tail], self.nodes[edge.head]
        if edge.time.shape != (tail.num_choices, head.num_choices):
            raise ProblemError(
                f"{where} has costs of shape {edge.time.shape}, but {tail.name!r} has "
                f"{tail.num_choices} choices and {head.name!r} has {head.num_choices}"
            )

    @property
    def parts(self) -> tuple[Node | Edge, ...]:
        """The terms of the price: the nodes, then the edges."""
        return (*self.nodes, *self.edges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of every node."""
        return tuple(node.num_choices for node in self.nodes)


def most(problem: Problem) -> tuple[float, int]:
    """Upper bounds of seconds and bytes over all assignments."""
    known: dict[tuple[int, int], tuple[float, int]] = {}  # tables are shared
    time, memory = 0.0, 0
    for part in problem.parts:
        key = id(part.time), id(part.memory)
        if key not in known:
            longest = float(part.time.max())
            if not math.isfinite(longest):
                longest = float(part.time[np.isfinite(part.time)].max(initial=0.0))
            known[key] = longest, int(part.memory.max())
        time, memory = time + known[key][0], memory + known[key][1]
    return time, memory


def price(problem: Problem, assignment: Sequence[int]) -> tuple[float, int]:
    """Seconds and bytes of one assignment, from scratch.

    Times are summed exactly and rounded once, so the price does not depend on any order.

    >>> node = Node("a", np.array([1.0, 2.0]), np.array([30, 20]))
    >>> edge = Edge(0, 1, np.array([[0.0, 5.0], [5.0, 0.0]]), np.zeros((2, 2), np.int64))
    >>> price(Problem((node, node), (edge,)), (0, 1))
    (8.0, 50)
    """
    if len(assignment) != len(problem.nodes):
        raise ProblemError(f"{len(assignment)} choices given for {len(problem.nodes)} nodes")
    pairs = list(zip(problem.nodes, assignment, strict=True))
    for node, k in pairs:
        if not 0 <= k < node.num_choices:
            raise ProblemError(
                f"choice {k} of node {node.name!r}, which has {node.num_choices} choices"
            )
    ends = [(edge, assignment[edge.tail], assignment[edge.head]) for edge in problem.edges]
    times = [float(node.time[k]) for node, k in pairs]
    times += [float(edge.time[i, j]) for edge, i, j in ends]
    memory = sum(int(node.memory[k]) for node, k in pairs)
    memory += sum(int(edge.memory[i, j]) for edge, i, j in ends)
    return math.fsum(times), memory


def _is_table(time: ArrayLike, memory: ArrayLike) -> bool:
    """Whether both are read-only arrays of the right types, as shared ones are."""
    return (
        type(time) is np.ndarray
        and type(memory) is np.ndarray
        and time.dtype is _TYPES["f"]
        and memory.dtype is _TYPES["i"]
        and not (time.flags.writeable or memory.flags.writeable)
    )


def _frozen(values: ArrayLike, kind: str, what: str) -> NDArray[np.generic]:
    given = np.asarray(values)
    if given.dtype.kind not in ("iu" if kind == "i" else "iuf"):
        raise ProblemError(f"{what} holds {given.dtype}, it must hold {_WORDS[kind]}")
    array: NDArray[np.generic] = given.astype(_TYPES[kind], copy=False)
    array.setflags(write=False)
    return array


_TYPES = {"f": np.dtype(np.float64), "i": np.dtype(np.int64)}
_WORDS = {"f": "seconds", "i": "whole bytes"}


def _check_costs(part: Node | Edge) -> None:
    where = repr(part.name) if isinstance(part, Node) else f"edge {part.tail} -> {part.head}"
    if not part.time.min() >= 0:  # NaN is not either
        raise ProblemError(f"{where} has a time of {_first(part.time, ~(part.time >= 0))} s")
    if part.memory.min() < 0:
        raise ProblemError(f"{where} has {_first(part.memory, part.memory < 0)} bytes of memory")


def _first(values: NDArray[np.generic], wrong: Iterable[object]) -> object:
    return values[np.asarray(wrong)].ravel()[0].item()
