"""How the result of `run` is shown."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.page import table

TITLE = "Memory budgets: counted peaks, gradients and times"
_KINDS = ("operators", "layers")


def body(result: dict[str, Any]) -> str:
    """What holds at all budgets, and a row of each."""
    rows, model = result["rows"], result["model"]
    searched = [row["operators"] for row in rows]
    errors = [abs(one["counted_bytes"] / one["predicted_bytes"] - 1) for one in searched]
    counted = [one["counted_bytes"] for one in searched]
    rises = sum(after > before for before, after in pairwise(counted))
    worst = max(one["gradient_error"] for one in searched)
    timed = all("seconds" in row[kind] for row in rows for kind in _KINDS)
    which = "seconds" if timed else "predicted_seconds"
    saved = [1 - row["operators"][which] / row["layers"][which] for row in rows]
    longest = 100 * max(0.0, -min(saved))
    what = (
        f"A GPT-2 of {model['layers']} layers of width {model['width']} on one CPU device, a step"
        f" of {model['tokens']:,} tokens within {len(rows)} budgets. Plans of the search keep or"
        " recompute single operators. Their counted peaks are within"
        f" {100 * max(errors):.2g} % of the predicted ones, and rise {rises} times as the budget"
        f" falls. Gradients differ from the module's, in float64, by {worst:.1g} at most. At equal"
        f" budgets they take {100 * fmean(saved):.1f} % less time on average than plans that keep"
        f" or recompute whole layers, and {longest:.1f} % more at most"
        f" ({'medians of measured steps' if timed else 'predicted, as no steps were timed'})."
    )
    head = ["budget, MiB", "counted", "predicted", "run again", "kept", "ms", "whole layers, ms"]
    lines = [
        [
            f"{row['budget'] / 2**20:.1f}",
            *(f"{row['operators'][f'{w}_bytes'] / 2**20:.1f}" for w in ("counted", "predicted")),
            *(str(row["operators"][name]) for name in ("recomputed", "kept")),
            *(f"{1e3 * row[kind][which]:.0f}" for kind in _KINDS),
        ]
        for row in rows
    ]
    return f"{what}\n\n{table(head, lines)}"
