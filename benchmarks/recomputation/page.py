"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table


def details(result: dict[str, Any]) -> str:
    """The times of both frontiers at every limit."""
    lines = []
    for name, model in result["models"].items():
        for row in model["limits"]:
            before, after = (row[kind]["seconds"] for kind in ("layers", "operators"))
            lines.append(
                [
                    name,
                    f"{row['limit'] / 2**30:.2f}",
                    f"{1e3 * before:.1f}",
                    f"{1e3 * after:.1f}",
                    f"{100 * (after / before - 1):+.1f} %",
                    str(row["operators"]["kept"]),
                    str(row["operators"]["recomputed"]),
                ]
            )
    took = "; ".join(
        f"{name} {model['searches']['operators']['seconds']:.2f} s instead of"
        f" {model['searches']['layers']['seconds']:.2f} s"
        for name, model in result["models"].items()
    )
    what = (
        f"Simulated milliseconds of a step on {result['machine planned for']} as {result['mesh']}"
        " within equal limits of simulated memory, where layers are kept or recomputed as a whole,"
        " and where recomputed layers may keep single operators; and how many operators the second"
        f" plan keeps and runs again. The searches take in processor time: {took}."
    )
    head = ["model", "GiB", "whole layers", "operators", "", "kept", "run again"]
    return f"{what}\n\n{table(head, lines)}"
