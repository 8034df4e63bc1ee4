"""Section of docs/benchmarks.md on the enumeration of uniform strategies."""

from __future__ import annotations

from typing import Any

TITLE = "Uniform strategies of Llama-70B"
COLUMNS = (
    *("devices", "strategies", "priced", "wall s", "CPU s"),
    *("sample", "largest bound of time", "of memory", "better"),
)


def body(result: dict[str, Any]) -> str:
    """A table of devices, strategies, seconds and what a sample of pruned strategies costs."""
    lines = [
        "All uniform strategies of a model with 80 layers on H100s, four sequences of 4,096 tokens"
        " a device: enumerated, pruned by bounds, and priced.",
        "A sample of what bounds rule out is priced too: no bound may be above the price (1.0), and"
        " none of the sample faster than the best by more than one per cent within the memory of a"
        " device.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| ---: " * len(COLUMNS) + "|",
    ]
    for row in result["rows"]:
        cells = (
            *(f"{row[key]:,}" for key in ("devices", "strategies", "priced")),
            *(f"{row[key]:.1f}" for key in ("wall_seconds", "cpu_seconds")),
            f"{row['sample']}",
            *(f"{row[key]:.3f}" for key in ("bound", "memory")),
            f"{row['better']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
