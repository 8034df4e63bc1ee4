"""How the result of `run` is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.page import table

TITLE = "SpecTrain: mini-batches on hosts with slow links"
_HEAD = """An asynchronous pipeline with a stage on each host against `DistributedDataParallel` on
the same hosts, or against 1F1B with as many micro-batches as stages; hosts of one machine
(`benchmarks/hosts`) share its cores. Both ways update after every mini-batch of 32 samples, and
take their steps in turns; times are those of a full pipeline."""
_AGAINST = {"ddp": "DDP", "1f1b": "1F1B"}


def body(result: dict[str, Any]) -> str:
    """Times and their ratio, by model, hosts and link."""
    rows = []
    for row in result["rows"]:
        every = row["every_round"]
        target = row["target"]
        rows.append(
            [
                f"{row['model']}, {_AGAINST[row['against']]}",
                str(row["hosts"]),
                f"{row['gbit_per_s']:g}",
                f"{row['seconds_other']:.3f}",
                f"{row['seconds_async']:.3f}",
                f"{row['times_faster']:.2f} ({min(every):.2f} to {max(every):.2f})",
                f"{target:g}" if target else "",
            ]
        )
    head = ["", "hosts", "Gbit/s", "other, s", "asynchronous, s", "times faster (rounds)", "asked"]
    return f"{_HEAD}\n\n{table(head, rows)}"
