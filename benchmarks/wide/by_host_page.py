"""How the result of `by_host` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Experts on several hosts: tokens once to each host"


def body(result: dict[str, Any]) -> str:
    """One row."""
    low, high = result["ratio_quartiles"]
    head = ["strategy", "to hosts first, ms", "to each device, ms", "ratio (quartiles)"]
    row = [
        f"`{result['strategy']}`",
        f"{result['chosen_seconds'] * 1e3:.0f}",
        f"{result['other_seconds'] * 1e3:.0f}",
        f"{result['ratio']:.3f} ({low:.3f} to {high:.3f})",
    ]
    page = "explanation/wide-models.md#rows-are-sent-to-their-experts"
    return (
        "A mixture of two layers with 32 experts, eight for each token, on two hosts with two"
        f" processes each (`benchmarks/hosts`), whose links carry {result['gbit_per_s']:g} Gbit/s."
        " The same plan sends tokens once to each host, or once to each device"
        f" ([how]({page})).\n\n{table(head, [row])}"
    )
