"""Bounds on the difference between additive costs and the simulated timeline.

The search adds up; sums of gradients that hide behind the backward pass, and sharded parameters
and their gradients on their way, make a step shorter than that. Of the additive seconds A, with H
those of such messages and o the part of them that the machine hides, a step takes T >= A - o H; and
as they follow one another, T >= H. So T >= A / (1 + o), and a bound on A gives one on T. Where
messages along different axes may pass k at once, T >= H / k and T >= A / (1 + k o).

What several operators read of a parameter in the same way is brought once, and tables have each of
them pay: of A, up to `most_shared` seconds are not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shardwright.ir.graph import Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.mixed_precision import stored_bytes
from shardwright.ir.plan import Plan
from shardwright.ir.redistribution import Collective
from shardwright.machine.model import Machine
from shardwright.machine.topology import links
from shardwright.simulate.costs.collectives import collective_seconds

T = TypeVar("T")


def most_hidden(graph: Graph, machine: Machine, mesh: Mesh) -> Seconds:
    """Seconds that no plan on `mesh` exceeds with what is on its way while operators run.

    Along each axis a parameter is either whole, and its gradient summed, or gathered twice, and its
    gradient scattered. Frozen ones have no gradient.
    """
    device, total = machine.device, 0.0
    streamed = device.bytes_per_s * device.efficiency.streaming
    for leaf, seconds in _moved(graph, machine, mesh):
        # Twice joined with others and cut out, the gradient joined
        # (`planner/communication/bucketing.py`).
        joined = 3 * device.launch_seconds + 10 * stored_bytes(graph, leaf.name) / streamed
        total += seconds + joined
    return Seconds(total)


def most_shared(graph: Graph, machine: Machine, mesh: Mesh, micro_batches: int) -> Seconds:
    """Seconds that no plan on `mesh` exceeds with what tables have more than one reader pay.

    Every micro-batch brings anew what its operators read.
    """
    reads = Counter(value for op in graph.ops for value in op.operands)
    moved = _moved(graph, machine, mesh)
    once = sum(max(0, reads[leaf.name] - 1) * seconds for leaf, seconds in moved)
    return Seconds(micro_batches * once)


def _moved(graph: Graph, machine: Machine, mesh: Mesh) -> Iterator[tuple[Leaf, float]]:
    """Every parameter, and at most how long it and its gradient are on their way for one reader."""
    seconds = partial(collective_seconds, machine=machine)
    for leaf in graph.leaves_of(LeafKind.PARAMETER):
        trained = graph.tensor[leaf.name].requires_grad
        size, total = Bytes(stored_bytes(graph, leaf.name)), 0.0
        for link in links(machine, mesh):
            tile = Bytes(-(-size // link.ranks))
            summed = seconds(Collective.ALL_REDUCE, link, size, size)
            gathered = seconds(Collective.ALL_GATHER, link, tile, size)
            scattered = seconds(Collective.REDUCE_SCATTER, link, size, tile)
            total += max(summed * trained, 2 * gathered + scattered * trained)
        yield leaf, total


def most_at_once(mesh: Mesh, contention: float) -> float:
    """How many messages along axes of `mesh` are under way at once, at most, on average.

    Each keeps the links of the other axes busy for the part `contention` of its time.

    >>> most_at_once(Mesh.parse("dp=2 tp=4"), 1.0), most_at_once(Mesh.parse("dp=2 tp=4"), 0.0)
    (1.0, 2.0)
    """
    axes = max(1, sum(size > 1 for size in mesh.shape))
    return axes / (1 + (axes - 1) * contention)


def bound_on_step(additive: float, overlap: float, hidden: Seconds, at_once: float = 1.0) -> float:
    """What no step beats whose additive seconds are at least `additive`.

    >>> bound_on_step(10.0, 0.5, Seconds(2.0)), bound_on_step(12.0, 0.5, Seconds(100.0))
    (9.0, 8.0)
    """
    return max(additive / (1 + at_once * overlap), additive - overlap * hidden)


def settled(
    candidates: Sequence[T], write: Callable[[T], Plan]
) -> tuple[list[tuple[Seconds, Bytes]], Callable[[T], Plan]]:
    """What the plans of `candidates` cost by their timelines; and the plans, written once."""
    plans = {id(candidate): write(candidate) for candidate in candidates}
    costs = [(plan.step_seconds, plan.peak_bytes) for plan in plans.values()]
    return costs, lambda candidate: plans[id(candidate)]
