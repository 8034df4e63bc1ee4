"""Bounds on the difference between additive and simulated seconds of a step.

Operators hide a part of all-reduces of gradients, and of all-gathers and reduce-scatters of sharded
parameters. Let C be the seconds of everything else, H those of these messages and o the fraction
that the machine hides at most. A step takes T >= C + (1 - o) H, as each message delays operators by
what is not hidden, and T >= H, because messages run one after another. The search adds up the first
bound. Where it charges hidden messages as well (`Machine.charges_hidden`), it adds up C + H, and
both bounds give T >= (C + H) / (1 + o). If k messages along different axes may run at the same
time, T >= H / k and T >= (C + H) / (1 + k o).

Operators that read a parameter in the same layout share one redistribution, but in the tables each
of them pays for it: up to `most_shared` seconds of the sum are counted more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import TypeVar

from shardwright.ir.graph import Graph, Leaf, LeafKind
from shardwright.ir.layout import Bytes, Mesh, Seconds
from shardwright.ir.options.mixed_precision import stored_bytes
from shardwright.ir.plan import Plan, PlannedTransfer
from shardwright.ir.redistribution import Collective, communication_named
from shardwright.machine.model import Machine
from shardwright.machine.topology import Link, contention_of, links
from shardwright.simulate.costs.collectives import charged_part, collective_seconds

T = TypeVar("T")


def charged_seconds(one: PlannedTransfer, machine: Machine) -> float:
    """The part of the seconds of a transfer of a parameter that tables count."""
    kinds = [communication_named(step.split(" ")[0]) for step in one.collectives]
    return one.seconds * fmean(charged_part(kind, machine) for kind in kinds)


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

    def seconds(kind: Collective, link: Link, before: Bytes, after: Bytes) -> float:
        return charged_part(kind, machine) * collective_seconds(kind, link, before, after, machine)

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


def most_counted(machine: Machine, mesh: Mesh, micro_batches: int) -> float:
    """The largest multiple of a simulated step that the tables of plans on `mesh` add up."""
    if not machine.charges_hidden:
        return 1.0
    contention = machine.contention
    if micro_batches > 1:  # the simulation of these knows which axes share links
        names = [name for name, size in mesh.axes if size > 1]
        between = (contention_of(machine, mesh, *two) for two in combinations(names, 2))
        contention = min(between, default=contention)
    return 1 + most_at_once(mesh, contention) * machine.most_overlap


def settled(
    candidates: Sequence[T], write: Callable[[T], Plan]
) -> tuple[list[tuple[Seconds, Bytes]], Callable[[T], Plan]]:
    """Costs of the plans that `write` makes of `candidates`, and a function to look plans up."""
    plans = {id(candidate): write(candidate) for candidate in candidates}
    costs = [(plan.step_seconds, plan.peak_bytes) for plan in plans.values()]
    return costs, lambda candidate: plans[id(candidate)]
