"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "SpecTrain: ranks against the simulation"


def body(result: dict[str, Any]) -> str:
    """Numbers compared and different, by stages, optimizer and weights."""
    rows = [
        [
            f"{row['stages']} stages, {row['optimizer']}, {row['weights']}",
            f"{row['compared']}",
            f"{row['different']}",
            f"{row['last_loss']:.6f}",
        ]
        for row in result["rows"]
    ]
    head = ["", "numbers compared", "of them different", "last loss"]
    return (
        f"A transformer in float64, {result['steps']} steps on one rank per stage: every loss, the"
        " loss of an evaluation and every parameter, bit for bit against the simulation in one"
        f" process.\n\n{table(head, rows)}"
    )
