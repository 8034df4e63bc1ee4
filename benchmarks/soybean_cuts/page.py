"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "SoyBean's measure: bytes by way of cutting"
_KINDS = ("data parallel", "model parallel", "k-cut", "joint")


def body(result: dict[str, Any]) -> str:
    """Gigabytes that all devices communicate in a step, by number of devices."""
    rows = []
    for model, found in result["models"].items():
        for row in found:
            gigabytes = (f"{row[f'{kind}, bytes'] / 1e9:.3f}" for kind in _KINDS)
            seconds = (f"{row[f'{kind}, processor seconds']:.2f}" for kind in _KINDS[2:])
            rows.append([model, str(row["devices"]), *gigabytes, *seconds])
    head = ["model", "devices", *(f"{kind}, GB" for kind in _KINDS), "s, k-cut", "s, joint"]
    return (
        "Communicated by all devices in a step, by the paper's measure, and processor seconds of"
        f" the search.\n\n{table(head, rows)}"
    )
