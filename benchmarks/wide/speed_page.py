"""How the result of `speed` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Split sequences, experts and vocabularies: speed"


def body(result: dict[str, Any]) -> str:
    """A row for each model and limit."""
    head = ["within", "chosen", "chosen, ms", "best without, ms", "ratio (quartiles)"]
    rows = table(head, [_row(row) for row in result["rows"]])
    return f"Two local ranks. A ratio of at most 1 is aimed at.\n\n{rows}"


def _row(row: dict[str, Any]) -> list[str]:
    limit = f"{row['model']}, {row['memory_limit'] / 2**20:.0f} MiB"
    if "least_bytes" in row["chosen"]:
        return [limit, "no plan fits", "", "", ""]
    ways = ", ".join(row["chosen"]["splits"]) or "not split"
    if "least_bytes" in row["other"]:
        return [limit, ways, "", "none fits", ""]
    if "measured" not in row:
        return [limit, ways, "", "", ""]
    found = row["measured"]
    low, high = found["ratio_quartiles"]
    return [
        limit,
        ways,
        f"{found['chosen_seconds'] * 1e3:.1f}",
        f"{found['other_seconds'] * 1e3:.1f}",
        f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})",
    ]
