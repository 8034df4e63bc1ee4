"""The result of `run` as a page: what was predicted, what was measured, and how far apart they are.

python -m benchmarks.estimates.page benchmarks/estimates/result.json > docs/estimates.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_HEAD = """# Estimates

What the cost model predicts, and what two local ranks measured: every plan's steps are taken in
turn with the others of its model, and the machine is measured right before (`shardwright profile`).
Errors are of the prediction, relative to the measurement; the spread is how far the middle half of
the steps are apart. Memory is that of tensors, counted during a step.
"""


def written(result: Path) -> str:
    """The page, in Markdown."""
    data: dict[str, Any] = json.loads(result.read_text())
    found, host = data["summary"], data["machine"]
    order = found["mean_spearman"]
    lines = [
        _HEAD,
        f"* Step time: mean error {found['mean_time_error']:.1%}, worst"
        f" {found['worst_time_error']:.1%}; spread of the steps {found['mean_spread']:.1%}.",
        f"* Order of a model's plans: Spearman {order:.2f} on average."
        if order is not None
        else "",
        f"* Peak memory: mean error {found['mean_memory_error']:.1%}, worst"
        f" {found['worst_memory_error']:.1%}.",
        f"* The chosen plan is the fastest measured one, or within 5 % of it, for"
        f" {found['chosen_within_5_percent']} of {len(found['chosen_over_fastest'])} models.",
        "",
        "| model | plan | predicted ms | measured ms | error | spread | predicted MiB |"
        " measured MiB | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *map(_row, data["rows"]),
        "",
        f"`{data['command']}`, commit {data['commit'][:12]}, {data['date']}, on"
        f" {host['cores']} cores of {host['processor']}; seed {data['seed']}.",
        "",
        "The machine as it was measured last:",
        "",
        "```toml",
        data["measured_machine"].strip(),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _row(row: dict[str, Any]) -> str:
    time = row["predicted_seconds"] / row["measured_seconds"] - 1
    memory = row["predicted_bytes"] / row["measured_bytes"] - 1
    return (
        f"| {row['model']} | {row['plan']} | {row['predicted_seconds'] * 1e3:.1f} |"
        f" {row['measured_seconds'] * 1e3:.1f} | {time:+.0%} | {row['spread']:.0%} |"
        f" {row['predicted_bytes'] / 2**20:.1f} | {row['measured_bytes'] / 2**20:.1f} |"
        f" {memory:+.0%} |"
    )


if __name__ == "__main__":
    print(written(Path(sys.argv[1])), end="")
