"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Micro-batches with sharded parameters, against an earlier commit"


def body(result: dict[str, Any]) -> str:
    """Times by model."""
    rows = []
    for row in result["rows"]:
        low, high = row["quartiles"]
        rows.append(
            [
                row["model"],
                f"{row['before_seconds'] * 1e3:.0f}",
                f"{row['now_seconds'] * 1e3:.0f}",
                f"{row['times_faster']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['link_seconds'] * 1e3:.0f}" if "link_seconds" in row else "",
            ]
        )
    head = ["", f"at {result['before'][:7]}, ms", "now, ms", "times faster (quartiles)", "link, ms"]
    return (
        f"{result['hosts']} hosts with links of {result['gbit_per_s']:g} Gbit/s, fully sharded"
        f" parameters, {result['micro_batches']} micro-batches; steps of both commits in turn."
        " In the last column is the least time in which a link sends what a rank of this commit"
        f" sends. Target: {result['target']:g} times.\n\n{table(head, rows)}"
    )
