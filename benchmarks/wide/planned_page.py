"""How the result of `planned` is shown."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.page import table

TITLE = "Long and sparse models as published: plans with the sequence or experts split"
_GIB = 2**30


def body(result: dict[str, Any]) -> str:
    """A row for each model with all splits and one without, and what the bounds say."""
    rows, said = [], []
    for one in result["rows"]:
        limit = one["memory_limit"] / _GIB
        name = f"{one['model']}, {one['batch']} x {one['length']:,} tokens"
        rows.append([name, *_cells(one["chosen"])])
        rows.append([f"no {one['split']}", *_cells(one["without"])])
        if "forced" in one:
            rows.append([f"{one['split']} along one axis at least", *_cells(one["forced"])])
        said.append(f"* {one['model']}: {_verdict(one, limit)}")
    head = ["", "split", "mesh", "s", "GiB", "at least, s", "with any memory, s"]
    lines = "\n".join(said)
    return (
        f"On {result['planned_for']}, every mesh of up to two axes, by the cost model: the fastest"
        " plan that fits, beside the fastest of those that leave the split out. The last two"
        " columns bound all plans of their row: those that add up to a device's memory, and all."
        f"\n\n{table(head, rows)}\n\n{lines}"
    )


def _cells(found: dict[str, Any]) -> list[str]:
    bounds = [f"{found[key]:.2f}" for key in ("at_least", "with_any_memory")]
    if "least_bytes" in found:
        return ["", "none fits", "", f"{found['least_bytes'] / _GIB:.1f} at least", *bounds]
    ways = ", ".join(found["splits"]) or "none"
    memory = f"{found['peak_bytes'] / _GIB:.1f}"
    return [ways, found["mesh"], f"{found['step_seconds']:.2f}", memory, *bounds]


def _verdict(one: dict[str, Any], limit: float) -> str:
    chosen, other, split = one["chosen"], one["without"], one["split"]
    if not chosen["splits"]:
        forced = one["forced"]
        if forced.get("step_seconds", math.inf) < chosen["step_seconds"]:
            return (
                f"a plan that splits {split} takes {forced['step_seconds']:.2f} s and was found"
                f" only when it was asked for, instead of one with {chosen['step_seconds']:.2f} s."
            )
        more = f"takes {forced['step_seconds']:.2f} s" if "mesh" in forced else "does not fit"
        return (
            f"the fastest plan splits no {split} and takes {chosen['step_seconds']:.2f} s; the"
            f" fastest that does {more}."
        )
    if "least_bytes" in other:
        return f"without the {split} split no plan was found that fits into {limit:.0f} GiB."
    if chosen["step_seconds"] < other["with_any_memory"]:
        return f"faster than every plan without the {split} split, whatever memory that takes."
    if chosen["step_seconds"] < other["at_least"]:
        return f"faster than every plan without the {split} split that adds up to {limit:.0f} GiB."
    return f"faster than the best plan found without the {split} split, not than its lower bound."
