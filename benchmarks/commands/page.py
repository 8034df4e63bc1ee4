"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.commands.run import SECONDS
from benchmarks.page import table

TITLE = "Whole commands: wall time of `shardwright plan`"


def body(result: dict[str, Any]) -> str:
    """A row for each command; seconds of wall, and of the processor in brackets."""
    rows = [
        [
            f"{row['name']} ({row['machine']}, {row['batch']} x {row['tokens']:,} tokens)",
            *(_seconds(row.get(which), result["limit"]) for which in ("before", "first", "next")),
            _seconds(row.get("limited"), result["limit"]),
            *(_step(row.get("step", {}).get(which)) for which in ("next", "limited")),
            f"{max(row[which].get('peak_gib', 0.0) for which in ('first', 'next')):.1f}",
            "" if row["aim"] is None else f"{row['aim']:g}",
        ]
        for row in result["rows"]
    ]
    limited = f"--seconds {SECONDS}"
    head = ["", f"at {result['before'][:7]}, s", "first, s", "next, s", f"`{limited}`, s"]
    head += ["step, ms", f"`{limited}`, step, ms", "GiB", "aim, s"]
    imports = result["imports"]
    return (
        "Seconds of wall time, and of the processor in brackets, of a new process each. `first` has"
        " an empty cache of captures, `next` the one that the first has left, and `--seconds"
        f" {SECONDS}` is that with a time limit of the search. torch and a"
        f" transformers model alone are imported in {imports['wall_seconds']:.1f} s"
        f" ({imports['cpu_seconds']:.1f}). GiB are of resident memory, the largest of all runs.\n\n"
        + table(head, rows)
    )


def _step(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.0f}"


def _seconds(found: dict[str, Any] | None, limit: float) -> str:
    if found is None:
        return ""
    if not found["ended"]:
        return f"over {limit:g}"
    if found["status"]:
        return f"refused (exit {found['status']})"
    return f"{found['wall_seconds']:.1f} ({found['cpu_seconds']:.1f})"
