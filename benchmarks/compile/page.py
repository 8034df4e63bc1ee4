"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Compile time, by number of layers"


def body(result: dict[str, Any]) -> str:
    """CPU seconds and functions of every model, and the ratio of most to fewest layers."""
    layers = [str(count) for count in result["layers"]]
    lines = []
    for name, row in result["rows"].items():
        seconds = [row[count]["seconds"] for count in layers]
        functions = ", ".join(str(row[count]["functions"]) for count in layers)
        ratio = f"{seconds[-1] / seconds[0]:.2f}"
        lines.append([name, *[f"{one:.1f}" for one in seconds], ratio, functions])
    what = (
        "CPU seconds to compile the step of a model on one device, without caches, and how many"
        f" functions are compiled. Aimed at: at most {result['aim']:g} times as long for"
        f" {layers[-1]} layers as for {layers[0]}."
    )
    head = ["model", *[f"{n} layers" for n in layers], "ratio", "functions"]
    return f"{what}\n\n{table(head, lines)}"
