"""How the result of `run` is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.page import table

TITLE = "Memory budgets: counted peaks, gradients and times"
_KINDS = ("operators", "layers")

Row = dict[str, Any]


def body(result: dict[str, Any]) -> str:
    """What holds at all budgets of each model, and a row of each budget."""
    sizes, models = result["sizes"], result["models"]
    what = (
        f"{' and '.join(models)} of {sizes['layers']} layers of width {sizes['width']} on one CPU"
        f" device, a step of {sizes['tokens']:,} tokens. Plans of the search keep or recompute"
        " single operators; whole layers are the fastest plan within the same budget that keeps or"
        " recomputes layers. Gradients are compared with the module's in float64. Where both run"
        " nothing again they are one program, and count as equally fast."
    )
    head = [
        *("", "budgets", "counted and predicted peaks differ by", "peaks that rise"),
        *("worst gradient", "less time than whole layers", "more at most", "times"),
    ]
    summary = table(head, [[name, *_summary(rows)] for name, rows in models.items()])
    parts = [f"**{name}**\n\n{_budgets(rows)}" for name, rows in models.items()]
    return "\n\n".join([what, summary, *parts])


def _summary(rows: Sequence[Row]) -> list[str]:
    searched = [row["operators"] for row in rows]
    errors = [abs(one["counted_bytes"] / one["predicted_bytes"] - 1) for one in searched]
    counted = [one["counted_bytes"] for one in searched]
    which = _times_of(rows)
    saved = [
        1 - row["operators"][which] / row["layers"][which] if _differ(row) else 0.0 for row in rows
    ]
    return [
        str(len(rows)),
        f"{100 * max(errors):.2g} %",
        str(sum(after > before for before, after in pairwise(counted))),
        f"{max(one['gradient_error'] for one in searched):.1g}",
        f"{100 * fmean(saved):.1f} %",
        f"{100 * max(0.0, -min(saved)):.1f} %",
        "medians" if which == "seconds" else "predicted",
    ]


def _budgets(rows: Sequence[Row]) -> str:
    which = _times_of(rows)
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
    return table(head, lines)


def _differ(row: Row) -> bool:
    """Whether a plan runs operators again, so that both are different programs."""
    return any(row[kind]["recomputed"] for kind in _KINDS)


def _times_of(rows: Sequence[Row]) -> str:
    timed = all("seconds" in row[kind] for row in rows for kind in _KINDS)
    return "seconds" if timed else "predicted_seconds"
