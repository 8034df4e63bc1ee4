"""Bounds on the difference between additive and simulated seconds of a step.

The search adds costs up. The simulated step time T is smaller than the sum, because all-reduces of
gradients, and all-gathers and reduce-scatters of sharded parameters, overlap with computation. Let
A be the additive seconds, H the seconds of these messages and o the fraction of them that the
machine hides. Then T >= A - o H, and T >= H, because the messages run one after another. So
T >= A / (1 + o), and a bound on A implies a bound on T. If k messages along different axes may run
at the same time, T >= H / k and T >= A / (1 + k o).

Operators that read a parameter in the same layout share one redistribution, but in the tables each
of them pays for it: up to `most_shared` seconds of A are counted more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shardwright.ir.graph import Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.options.mixed_precision import stored_bytes
from shardwright.ir.plan import Plan
from shardwright.ir.redistribution import Collective
from shardwright.machine.model import Machine
from shardwright.machine.topology import links
from shardwright.simulate.costs.collectives import collective_seconds

T = TypeVar("T")


def most_hidden(graph: Graph, machine: Machine, mesh: Mesh) -> Seconds:
    """Upper bound over all plans on `mesh` of the seconds of messages that may overlap.

    Along each axis a parameter is either replicated, with an all-reduce of its gradient, or
    gathered twice, with a reduce-scatter of its gradient. Frozen parameters have no gradient.
    """
    device, total = machine.device, 0.0
    streamed = device.bytes_per_s * device.efficiency.streaming
    for leaf, seconds in _moved(graph, machine, mesh):
        # Packed into a bucket and unpacked twice, the gradient packed once
        # (`planner/communication/bucketing.py`).
        joined = 3 * device.launch_seconds + 10 * stored_bytes(graph, leaf.name) / streamed
        total += seconds + joined
    return Seconds(total)


def most_shared(graph: Graph, machine: Machine, mesh: Mesh, micro_batches: int) -> Seconds:
    """Upper bound over all plans on `mesh` of the seconds that tables count more than once.

    Every micro-batch redistributes again what its operators read.
    """
    reads = Counter(value for op in graph.ops for value in op.operands)
    moved = _moved(graph, machine, mesh)
    once = sum(max(0, reads[leaf.name] - 1) * seconds for leaf, seconds in moved)
    return Seconds(micro_batches * once)


def _moved(graph: Graph, machine: Machine, mesh: Mesh) -> Iterator[tuple[Leaf, float]]:
    """Every parameter with an upper bound of the seconds of its messages for one reader."""
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
    """Upper bound of the mean number of messages along axes of `mesh` that run at once.

    Each message blocks the links of the other axes for the part `contention` of its time.

    >>> most_at_once(Mesh.parse("dp=2 tp=4"), 1.0), most_at_once(Mesh.parse("dp=2 tp=4"), 0.0)
    (1.0, 2.0)
    """
    axes = max(1, sum(size > 1 for size in mesh.shape))
    return axes / (1 + (axes - 1) * contention)


def bound_on_step(additive: float, overlap: float, hidden: Seconds, at_once: float = 1.0) -> float:
    """Lower bound of the seconds of a step whose additive seconds are at least `additive`.

    >>> bound_on_step(10.0, 0.5, Seconds(2.0)), bound_on_step(12.0, 0.5, Seconds(100.0))
    (9.0, 8.0)
    """
    return max(additive / (1 + at_once * overlap), additive - overlap * hidden)


def settled(
    candidates: Sequence[T], write: Callable[[T], Plan]
) -> tuple[list[tuple[Seconds, Bytes]], Callable[[T], Plan]]:
    """Costs of the plans that `write` makes of `candidates`, and a function to look plans up."""
    plans = {id(candidate): write(candidate) for candidate in candidates}
    costs = [(plan.step_seconds, plan.peak_bytes) for plan in plans.values()]
    return costs, lambda candidate: plans[id(candidate)]
