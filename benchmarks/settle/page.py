"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Time and memory of one candidate, by number of layers"


def body(result: dict[str, Any]) -> str:
    """Milliseconds of every strategy, and the ratio of most to fewest layers."""
    layers = [str(count) for count in result["layers"]]
    lines = []
    for name, row in result["rows"].items():
        compared = [row[count]["compared_seconds"] for count in layers]
        few = all(row[count]["from_few_layers"] for count in layers[1:])
        lines.append(
            [
                name,
                *[f"{1e3 * seconds:.0f}" for seconds in compared],
                f"{compared[-1] / compared[0]:.2f}",
                f"{1e3 * row[layers[-1]]['again_seconds']:.0f}",
                f"{1e3 * row[layers[-1]]['settled_seconds']:.0f}",
                "yes" if few else "no",
            ]
        )
    aims = result["aims"]
    equal = all(one["equal"] for row in result["rows"].values() for one in row.values())
    costs = "Both ways find equal costs." if equal else "Both ways find different costs."
    what = (
        f"Llama-8B of {', '.join(layers)} layers, planned for {result['machine planned for']}:"
        " processor milliseconds to find a candidate's time and memory, those if its few layers are"
        " those of a candidate before, and those to lower and simulate its whole program."
        f" {costs} Aimed at: at most {aims['ratio']:g} times as long"
        f" for {layers[-1]} layers as for {layers[0]}, and {1e3 * aims['seconds']:.0f} ms."
    )
    head = [
        "strategy",
        *[f"{n} layers" for n in layers],
        "ratio",
        "again",
        "whole program",
        "from few",
    ]
    return f"{what}\n\n{table(head, lines)}"
