"""What the timeline makes of additive times and of bounds on them.

The search adds up; sums of gradients that hide behind the backward pass make a
step shorter than that. Of the additive seconds A, with H those of such sums and
o the part of them that the machine hides, a step takes T >= A - o H; and as
sums follow one another, T >= H. So T >= A / (1 + o), and a bound on A gives
one on T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwright.cost.collectives import collective_seconds
from shardwright.cost.topology import links
from shardwright.ir.graph import Graph, LeafKind
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.machine import Machine
from shardwright.ir.masters import stored_bytes
from shardwright.ir.plan import Plan
from shardwright.ir.redistribution import Collective

T = TypeVar("T")


def most_summed(graph: Graph, machine: Machine, mesh: Mesh) -> Seconds:
    """Seconds that no plan on `mesh` exceeds with its sums of gradients."""
    total = 0.0
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        tensor = graph.tensor[leaf.name]
        if tensor.requires_grad:
            size = Bytes(stored_bytes(graph, leaf.name))
            for link in links(machine, mesh):
                total += collective_seconds(Collective.ALL_REDUCE, link, size, size, machine)
    return Seconds(total)


def bound_on_step(additive: float, overlap: float, summed: Seconds) -> float:
    """What no step beats whose additive seconds are at least `additive`.

    >>> bound_on_step(10.0, 0.5, Seconds(2.0)), bound_on_step(12.0, 0.5, Seconds(100.0))
    (9.0, 8.0)
    """
    return max(additive / (1 + overlap), additive - overlap * summed)


def settled(
    candidates: Sequence[T], write: Callable[[T], Plan]
) -> tuple[list[tuple[Seconds, Bytes]], Callable[[T], Plan]]:
    """What the plans of `candidates` cost by their timelines; and the plans, written once."""
    plans = {id(candidate): write(candidate) for candidate in candidates}
    costs = [(plan.step_seconds, plan.peak_bytes) for plan in plans.values()]
    return costs, lambda candidate: plans[id(candidate)]
