"""Plans with a split and without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shardwright as sw
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.graph import Graph
from shardwright.machine.model import Machine


def both(graph: Graph, machine: Machine, words: Sequence[str]) -> tuple[sw.Frontier, sw.Frontier]:
    """All that is searched, and what is left where nothing is split that the `words` mean."""
    left_out = [f"forbid *=*:{word}" for word in words]
    return sw.search(graph, machine), sw.search(graph, machine, constraints=left_out)


def fastest(frontier: sw.Frontier, limit: int, words: Sequence[str]) -> dict[str, Any]:
    """The fastest plan within `limit` bytes if one fits, and bounds on the time of all.

    `at_least` holds for plans that add up to `limit` bytes, `with_any_memory` for every plan.
    """
    found = {
        "at_least": frontier.bound(limit),
        "with_any_memory": frontier[0].lower_bound_seconds,
    }
    try:
        return line(frontier.fastest(limit), words) | found
    except InfeasibleError as e:
        return {"least_bytes": e.smallest_bytes, **found}


def line(plan: sw.Plan, words: Sequence[str]) -> dict[str, Any]:
    """What a plan costs by the model, and how it splits what the `words` mean, each way once."""
    found = {s for op in plan.ops for s in op.splits if any(word in s for word in words)}
    return {
        "mesh": str(plan.mesh),
        "step_seconds": plan.step_seconds,
        "peak_bytes": plan.peak_bytes,
        "splits": sorted(found),
    }
