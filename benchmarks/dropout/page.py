"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Exact dropout: time against torch's own"


def body(result: dict[str, Any]) -> str:
    """Seconds of a step by either clock."""
    rows = []
    for clock in ("wall", "cpu"):
        found = result[clock]
        low, high = found["ratio_quartiles"]
        rows.append(
            [
                f"{clock} time",
                f"{found['exact_seconds']:.2f}",
                f"{found['fast_seconds']:.2f}",
                f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})",
            ]
        )
    head = ["", "s exact", "s fast", "ratio"]
    what = (
        f"A GPT-2 of {result['layers']} layers, {result['width']} wide, {result['length']} tokens,"
        f' with `rng="exact"` and `"fast"`. Target: {result["target"]:g}.'
    )
    return f"{what}\n\n{table(head, rows)}"
