"""How the result of `experts` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "Experts and vocabularies: plans and speed with them split"
_GIB = 2**30


def body(result: dict[str, Any]) -> str:
    """The published model by the cost model, then small ones on local ranks."""
    return f"{_published(result['published'])}\n\n{_local(result['local'])}"


def _published(row: dict[str, Any]) -> str:
    chosen, other = row["with"], row["without"]
    ways = ", ".join(chosen["splits"]) or "no experts"
    found = (
        f"{row['model']} on {row['machine']}, batch {row['batch']} of {row['length']} tokens, every"
        f" mesh of up to two axes, {row['search_cpu_seconds']:.1f} CPU seconds: the fastest plan"
        f" splits {ways} on {chosen['mesh']} and takes {chosen['step_seconds'] * 1e3:.1f} ms and"
        f" {chosen['peak_bytes'] / _GIB:.1f} GiB by the cost model. "
    )
    if "infeasible" in other:
        return f"{found}Without splitting experts no plan fits: {other['infeasible']}."
    return (
        f"{found}Without splitting experts the fastest takes {other['step_seconds'] * 1e3:.1f} ms,"
        f" and none less than {other['at_least'] * 1e3:.1f}."
    )


def _local(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        limit = f"{row['model']}, {row['memory_limit'] / 2**20:.0f} MiB"
        if "infeasible" in row:
            lines.append([limit, "no plan fits", "", "", ""])
        elif "measured" not in row:
            ways = ", ".join(row["chosen"]["splits"]) or "not split"
            lines.append([limit, ways, "", "", ""])
        else:
            found = row["measured"]
            low, high = found["ratio_quartiles"]
            lines.append(
                [
                    limit,
                    ", ".join(row["chosen"]["splits"]),
                    f"{found['chosen_seconds'] * 1e3:.1f}",
                    f"{found['other_seconds'] * 1e3:.1f}",
                    f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})",
                ]
            )
    head = ["within", "chosen", "chosen, ms", "best without, ms", "ratio (quartiles)"]
    return f"Two local ranks. A ratio of at most 1 is aimed at.\n\n{table(head, lines)}"
