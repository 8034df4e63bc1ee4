"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "What a checkpoint costs"


def body(result: dict[str, Any]) -> str:
    """Ratios to the same steps without a checkpoint."""
    rows = []
    for how in ("in the background", "waited for"):
        found = result[how]
        low, high = found["ratio_quartiles"]
        rows.append(
            [how, f"{found['seconds']:.2f}", f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})"]
        )
    plain = result["no checkpoint"]["seconds"]
    return (
        f"{result['every']} steps of a GPT-2 on two ranks take {plain:.2f} s without a checkpoint;"
        f" with one of {result['checkpoint_bytes'] / 1e6:.0f} MB:\n\n"
        f"{table(['written', 's', 'ratio (quartiles)'], rows)}\n\n"
        f"Median of {result['rounds']} rounds. Target in the background:"
        f" {result['target_ratio']:g}."
    )
