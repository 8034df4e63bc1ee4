"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Memory of a start by shards"


def body(result: dict[str, Any]) -> str:
    """The growth of memory of the rank that needed the most."""
    rows = []
    for row in result["rows"]:
        share = max(one["share_bytes"] for one in row["ranks"])
        most = {
            way: max(one[way]["peak_bytes"] for one in row["ranks"])
            for way in ("built", "saved", "loaded")
        }
        cells = (share, most["built"], row["over_share_bytes"]["built"], most["saved"])
        rows.append([row["strategy"], *(f"{size / 1e6:.0f}" for size in cells)])
    head = ["strategy", "share of a rank, MB", "peak, MB", "beyond the share", "save_pretrained"]
    return (
        f"A model of {result['model_bytes'] / 1e9:.2f} GB is built on {result['ranks']} ranks from"
        " the function that makes it: growth of resident memory at the most, of the worst rank.\n\n"
        f"{table(head, rows)}\n\n"
        f"Target: {result['allowed_over_share_bytes'] / 1e6:.0f} MB beyond the share."
    )
