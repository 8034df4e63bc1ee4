"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Capture: time against depth"


def body(result: dict[str, Any]) -> str:
    """Seconds by number of layers."""
    rows = []
    for model, found in result["models"].items():
        few, many = (min(found["processor_seconds"][layers]) for layers in ("32", "128"))
        rows.append([model, f"{few:.1f}", f"{many:.1f}", f"{found['ratio']:.2f}"])
    head = ["model", "s for 32 layers", "s for 128 layers", "ratio"]
    return f"Target: a ratio of at most {result['target']:g}.\n\n{table(head, rows)}"
