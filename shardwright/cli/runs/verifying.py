"""Decides whether a run is compared with one device at its end: where this host can in minutes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil, prod

from shardwright.ir.graph import ITEM_BYTES, Graph, LeafKind
from shardwright.ir.plan import Plan
from shardwright.machine.host_memory import host_bytes
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.useful_flop import useful_flop

_SIDES = 3  # that compute a step: the module, its graph and the ranks
_COPIES = 3  # of parameters on each side: values, gradients and values after a step
_WIDE = ITEM_BYTES["float64"]
_FLOP_PER_S = 2e9  # of a core, in float64: what most products reach at least
_MOST_SECONDS = 600.0
_MOST_MEMORY = 0.8  # of the memory of the host


@dataclass(frozen=True, slots=True)
class ComparisonEffort:
    """Bytes of this host's memory that a comparison in float64 takes, and seconds, both roughly."""

    bytes: int
    seconds: float

    def reason_against(self, memory: int) -> str:
        """The text on what is too much for a host of `memory` bytes; empty if nothing is."""
        if self.bytes > _MOST_MEMORY * memory:
            return f"takes about {ceil(self.bytes / 2**30)} GiB of this host's {memory / 2**30:.0f}"
        if self.seconds > _MOST_SECONDS:
            return f"takes about {ceil(self.seconds / 60)} minutes of {_cores()} cores"
        return ""


def effort(graph: Graph, plan: Plan) -> ComparisonEffort:
    """The effort of `sw.verify` on a step of `graph`, with the ranks of `plan` on this host."""
    tensors = [graph.tensor[leaf.name] for leaf in graph.leaves_of(LeafKind.PARAMETER)]
    parameters = _SIDES * _COPIES * _WIDE * sum(prod(one.shape) for one in tensors)
    narrowest = min((ITEM_BYTES[one.dtype] for one in tensors), default=_WIDE)
    # What operators keep is on the ranks together, and on each of the other sides.
    kept = plan.memory.saved + plan.memory.workspace if plan.memory is not None else 0
    activations = _SIDES * plan.devices * kept * max(1, _WIDE // narrowest)
    flop = _SIDES * useful_flop(graph, analyze(graph))
    return ComparisonEffort(parameters + activations, flop / (_cores() * _FLOP_PER_S))


def reason_against(graph: Graph, plan: Plan) -> str:
    """The text on why a run is not verified unless asked to be; empty if it is.

    >>> ComparisonEffort(2**40, 60.0).reason_against(2**36)
    "takes about 1024 GiB of this host's 64"
    """
    return effort(graph, plan).reason_against(host_bytes())


def _cores() -> int:
    return len(os.sched_getaffinity(0))
