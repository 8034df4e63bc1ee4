"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Same strategy, same speed: against DDP, FSDP2 and parallelize_module"


def body(result: dict[str, Any]) -> str:
    """Ratios by model and strategy."""
    rows = []
    for row in result["rows"]:
        wall, cpu = row["wall"], row["cpu"]
        low, high = wall["ratio_quartiles"]
        rows.append(
            [
                f"{row['model']}, {row['strategy']}{', compiled' * row.get('compiled', False)}",
                f"{wall['ours_seconds'] * 1e3:.1f}",
                f"{wall['by_hand_seconds'] * 1e3:.1f}",
                f"{wall['ratio']:.3f} ({low:.3f} to {high:.3f})",
                f"{cpu['ratio']:.3f}",
            ]
        )
    head = ["", "ours, ms", "by hand, ms", "ratio (quartiles)", "ratio of CPU time"]
    return f"Two local ranks. Target: {result['target']:g}.\n\n{table(head, rows)}"
