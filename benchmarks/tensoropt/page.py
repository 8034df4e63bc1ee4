"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "TensorOpt: 1 to 4 ranks under falling memory limits"
_CONTESTANTS = ("DistributedDataParallel", "fully_shard", "ours")
_MIB = 2**20


def body(result: dict[str, Any]) -> str:
    """Milliseconds of a step, or why there are none, by ranks and limit."""
    rows = []
    for row in result["rows"]:
        cells = [_cell(row["outcomes"].get(name)) for name in _CONTESTANTS]
        need = row["predicted_bytes"]
        predicted = "-" if need is None else f"{need / _MIB:.0f}"
        rows.append([str(row["ranks"]), f"{row['limit_bytes'] / _MIB:.0f}", *cells, predicted])
    ends = [
        f"{ranks}: {len(points)} plans, {points[0]['peak_bytes'] / _MIB:.0f} to"
        f" {points[-1]['peak_bytes'] / _MIB:.0f} MiB"
        for ranks, points in result["frontiers"].items()
    ]
    head = ["ranks", "limit, MiB", *(f"{name}, ms" for name in _CONTESTANTS)]
    head.append("ours predicted, MiB")
    slack = f"{result['allowance_bytes'] / _MIB:.0f} MiB"
    what = (
        "Linear layers, 32 MiB of parameters, AdamW, a batch of 1024. The kernel limits each rank's"
        f" private memory to what it has besides tensors, the limit, and {slack} for fragments of"
        f" the heap. Frontiers by ranks: {'; '.join(ends)}."
    )
    return f"{what}\n\n{table(head, rows)}"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    failed: str = found["failed"]
    return failed if found["seconds"] is None else f"{found['seconds'] * 1e3:.0f}"
