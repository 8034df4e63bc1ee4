"""The JSON of plans that commands print: figures, a row of a list, and all of a plan."""

from __future__ import annotations

import json
from typing import Any

from shardwright.ir.memory import as_json as memory_content
from shardwright.ir.plan import Plan
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.report.headline import headline
from shardwright.report.summary import summary
from shardwright.report.text import notes


def figures(plan: Plan) -> dict[str, Any]:
    """The time in seconds, the memory in bytes, and the division of the devices."""
    return {
        "step_seconds": plan.step_seconds,
        "peak_bytes": plan.peak_bytes,
        "devices": plan.devices,
        "mesh": str(plan.mesh),
        "micro_batches": plan.micro_batches,
        "stages": plan.stages,
    }


def row(plan: Plan, limit: int | None) -> dict[str, Any]:
    """A plan among others: its figures, whether it fits in `limit` bytes, and its two lines."""
    return {
        **figures(plan),
        "fits": limit is None or plan.peak_bytes <= limit,
        "headline": headline(plan),
        "summary": summary(plan),
    }


def parts(plan: Plan) -> dict[str, Any]:
    """The figures of one plan, the parts of its memory, its bound, its lines and its remarks."""
    return {
        **figures(plan),
        "memory": memory_content(plan.memory),
        "lower_bound_seconds": plan.lower_bound_seconds,
        "headline": headline(plan),
        "summary": summary(plan),
        "remarks": notes.as_json(plan),
    }


def whole(plan: Plan, file: str | None) -> dict[str, Any]:
    """`parts`, and `plan`, the content of the plan file, which was written to `file`."""
    return {**parts(plan), "file": file, "plan": json.loads(plan_to_json(plan))}
