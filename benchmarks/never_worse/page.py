"""How the result of `run` is shown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.page import table

TITLE = "Chosen plans against the best baseline that fits"


def body(result: dict[str, Any]) -> str:
    """Time by the cost model over the best baseline's, by machine."""
    rows = []
    for machine in dict.fromkeys(row["machine"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["machine"] == machine]
        ratios = [row["ratio"] for row in mine if row["ratio"] is not None]
        own = sum(not row["chosen"].startswith("searched") for row in mine)
        rows.append(
            [
                machine,
                str(len(mine)),
                *(f"{f(ratios):.3f}" if ratios else "" for f in (min, statistics.median, max)),
                str(own),
                f"{max(row['gap'] for row in mine):.2%}",
            ]
        )
    head = ["machine", "choices", "best ratio", "median", "worst", "baselines chosen", "most above"]
    return (
        f"{result['models']} models, each on four machines under three memory limits. A ratio is"
        " the chosen plan's time over that of the best baseline that fits, both by the cost model;"
        " target: never above 1. The last column is how far above its lower bound a choice may"
        f" be.\n\n{table(head, rows)}"
    )
