"""How the result of `memory` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Long sequences and wide vocabularies: memory of ranks that share them"
_GIB, _MIB = 2**30, 2**20


def body(result: dict[str, Any]) -> str:
    """What fits under an enforced limit, and what is counted."""
    shown = {"long": _long, "logits": _logits}
    rows = {part: [row for row in result["rows"] if row["part"] == part] for part in shown}
    return "\n\n".join(show(rows[part]) for part, show in shown.items() if rows[part])


def _long(found: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{row['devices']}",
            ", ".join(row["plan"]["splits"]) or "not split",
            f"{row['plan']['peak_bytes'] / _GIB:.2f}",
            row["outcome"],
        ]
        for row in found
    ]
    allowed = found[0]["allowed_bytes"] / _GIB
    head = ["processes", "its sequence", "GiB predicted", "a step"]
    return (
        f"A small Llama on {found[0]['tokens']:,} tokens; each process may allocate"
        f" {allowed:g} GiB, which the system enforces.\n\n{table(head, rows)}"
    )


def _logits(found: list[dict[str, Any]]) -> str:
    alone = found[0]["counted_bytes"]
    rows = [
        [
            f"{row['devices']}",
            ", ".join(row["plan"]["splits"]) or "not split",
            f"{row['counted_bytes'] / _MIB:.2f}",
            f"{alone / row['counted_bytes']:.2f}",
        ]
        for row in found
    ]
    head = ["ranks", "its vocabulary", "MiB of tensors", "times less"]
    return (
        "A table of 50,257 words that is also the head, next to nothing else: the most bytes of"
        " tensors during a step, beside what is there before, on the"
        f" first rank; the logits alone are {found[0]['logits_bytes'] / _MIB:.2f} MiB.\n\n"
        f"{table(head, rows)}"
    )
