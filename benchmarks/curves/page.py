"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "One loss curve under every plan"


def body(result: dict[str, Any]) -> str:
    """The largest relative difference to one device, by plan."""
    runs = result["runs"]
    names = next(iter(runs.values()))["largest_difference"]
    rows = [
        [name, *(f"{run['largest_difference'][name]:.1e}" for run in runs.values())]
        for name in names
    ]
    head = [f"{dtype}, {run['steps']} steps" for dtype, run in runs.items()]
    bounds = " and ".join(f"{run['bound']:g} in {dtype}" for dtype, run in runs.items())
    falls = ", ".join(
        f"from {run['first']:.2f} to {run['last']:.2f} in {dtype}" for dtype, run in runs.items()
    )
    return (
        "A GPT-2 on bytes with dropout, AdamW in two groups, clipping and accumulation: the largest"
        f" relative difference of a loss to that of one device, which falls {falls}.\n\n"
        f"{table(['', *head], rows)}\n\nBounds: {bounds}."
    )
