"""How the result of `sequence` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Long sequences: memory, plans and speed with the sequence split"
_GIB = 2**30


def body(result: dict[str, Any]) -> str:
    """What fits, what is planned, what is fast."""
    parts = {"memory": _memory, "plan": _plan, "speed": _speed}
    return "\n\n".join(show(result[name]) for name, show in parts.items() if name in result)


def _memory(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{one['devices']} ({one['attention']})",
            f"{one['predicted_bytes'] / _GIB:.2f}",
            one["outcome"],
        ]
        for one in (found["one"], found["shared"])
    ]
    allowed = found["allowed_bytes"] / _GIB
    return (
        f"A small Llama on {found['tokens']:,} tokens; each process may allocate {allowed:g} GiB,"
        f" which the system enforces.\n\n{table(['processes', 'GiB predicted', 'a step'], rows)}"
    )


def _plan(found: dict[str, Any]) -> str:
    rows = []
    for name, one in (("all", found["chosen"]), ("no sequence is split", found["without"])):
        best = f"{one['step_seconds']:.2f}" if "step_seconds" in one else "none"
        least = f"{one['smallest_bytes'] / _GIB:.1f}"
        rows.append([name, best, one.get("attention", ""), f"{one['fastest_seconds']:.2f}", least])
    head = ["plans", f"s within {found['limit']}", "its attention", "s without limit", "least GiB"]
    return (
        f"Llama-3-8B, {found['samples']} samples of {found['tokens']:,} tokens on 8x8xH100, by the"
        f" cost model.\n\n{table(head, rows)}"
    )


def _speed(found: dict[str, Any]) -> str:
    rows = [
        [one["attention"], f"{one['predicted_seconds']:.2f}", f"{one['seconds']:.2f}"]
        for one in (found["chosen"], found["without"])
    ]
    low, high = found["ratio_quartiles"]
    return (
        f"A small Llama on {found['tokens']:,} tokens, two local ranks: the plan chosen takes"
        f" {found['ratio']:.3f} ({low:.3f} to {high:.3f}) of the time of the best that splits no"
        f" sequence. Target: 1.\n\n{table(['attention', 's predicted', 's measured'], rows)}"
    )
