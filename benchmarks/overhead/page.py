"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "One rank: the lowered program against the plain module"


def body(result: dict[str, Any]) -> str:
    """Ratios by model and optimizer."""
    rows = []
    for model, optimizers in result["models"].items():
        for optimizer, found in optimizers.items():
            ratios = [found["lowered"]["ratio"], found["lowered, process group"]["ratio"]]
            plain = found["plain"]["seconds"] * 1e3
            rows.append([f"{model}, {optimizer}", f"{plain:.1f}", *(f"{r:.3f}" for r in ratios)])
    head = ["", "plain, ms", "lowered over plain", "in a process group"]
    clock = f"Clock: {result['clock']}. Target: {result['target']:g}."
    return f"{clock}\n\n{table(head, rows)}"
