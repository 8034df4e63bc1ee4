"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Pipelines: predicted and measured steps"


def body(result: dict[str, Any]) -> str:
    """Times by model and schedule."""
    rows = []
    for row in result["rows"]:
        rows.append(
            [
                f"{row['model']}, {row['schedule']}",
                str(row["stages"]),
                str(row["micro_batches"]),
                f"{row['predicted_seconds'] * 1e3:.0f}",
                f"{row['timeline_seconds'] * 1e3:.0f}",
                f"{row['measured_seconds'] * 1e3:.0f}",
                f"{row['error']:+.0%}",
                f"{row['spread']:.0%}",
            ]
        )
    head = ["", "stages", "micro-batches", "predicted, ms", "on the timeline, ms"]
    head += ["measured, ms", "error", "spread"]
    return (
        "Two groups of one local rank each; steps of a model's plans are taken in turn, the time is"
        " the median of the slower rank's, the spread how far the middle half of them are apart."
        f" Error of the prediction: mean {result['mean_error']:.1%}, worst"
        f" {result['worst_error']:.1%} (asked: 15 %).\n\n{table(head, rows)}"
    )
