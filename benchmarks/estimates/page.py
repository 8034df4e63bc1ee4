"""The results of `run` as a page: predictions, measurements, and the errors between them.

python -m benchmarks.estimates.page > docs/estimates.md
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.page import table

FOLDER = Path(__file__).parent
FILES = ("result.json", "parts.json")
_HEAD = """# Estimates

Predicted and measured step times and memory on two ranks. Steps of a model's plans
alternate{how}. The machine and the dominant operators are measured before
these steps and again after them (`shardwright profile`), because the speed of a shared host changes
by the minute. The prediction is the mean of both; the drift is their relative difference.
The error is that of the prediction relative to the measurement; the spread is the interquartile
range of the steps. Where drift or spread is more than 12 % on average over a model's plans, the
model is measured again, and the measurement with less noise counts, whatever was
predicted. Computing compares the sum of all operators and updates with the CPU time of a rank's
main thread. Memory is that of tensors, counted during a step.

Two plans are distinguishable where the medians of their steps differ by more than twice the
uncertainty of the difference. Spearman's correlation counts all pairs, also those of plans that
take equally long, whose order is noise. Where the chosen plan equals a baseline, both are one
plan with the mean of their times.
"""
_PARTS = """Steps in micro-batches, in pipeline stages and with sharded replicas follow. Their
predicted times and memory are those of the simulated step program, as `shardwright plan` shows
them. Each model was measured once, between two measurements of the machine.
"""


# Of results since there are several runs, and since steps are compared within rounds.
_RUNS = " in a changing order, on ranks that are restarted now and then"
_PACED = """. Each step is compared with the others of
its round, so that a host that is slow for some seconds affects all plans alike"""


def written(folder: Path = FOLDER) -> str:
    """The page of the results in `folder`, in Markdown."""
    files = [folder / name for name in FILES if (folder / name).exists()]
    results: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    rows = [row for data in results for row in data["rows"]]
    anew = any(row.get("of_runs") for row in rows)
    paced = any(row.get("paced_spread") for row in rows)
    lines = [_HEAD.format(how=(_RUNS if anew else "") + (_PACED if paced else ""))]
    for data in results:
        lines += _sections(data)
    return "\n".join(lines).rstrip() + "\n"


def _sections(data: dict[str, Any]) -> Iterator[str]:
    """The sections of one result."""
    host, parts = data["machine"], data.get("parts", False)
    if parts:
        yield _PARTS
    for place, found in data["summary"].items():
        rows = [row for row in data["rows"] if row["place"] == place]
        yield from (f"## On {place}", "", *_summary(found, "2 %" if parts else "3 %"), "")
        if parts:
            yield from (_by_plan(rows), "")
        yield from (*_table(rows), "")
    if data["failures"]:
        yield from ("## Not measured", "", *(f"* {failure}" for failure in data["failures"]), "")
    yield from (
        f"`{data['command']}`, commit {data['commit'][:12]}, {data['date']}, on"
        f" {host['cores']} cores of {host['processor']}; seed {data['seed']}.",
        "",
    )
    for place, machine in data["machines"].items():
        peaks = ", ".join(f"{peak / 1e9:.1f}" for peak in data["peaks_measured"][place])
        yield from (
            f"The machine on {place}, as it was first measured (float32 peak, each time:"
            f" {peaks} GFLOP/s):",
            "",
            "```toml",
            machine.strip(),
            "```",
            "",
        )


def _by_plan(rows: list[dict[str, Any]]) -> str:
    """Errors of each plan over all models, without their signs."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        time = row["predicted_seconds"] / row["measured_seconds"] - 1
        memory = row["predicted_bytes"] / row["measured_bytes"] - 1
        errors.setdefault(row["plan"], []).append((abs(time), abs(memory)))
    head = ["plan", "models", "mean error of time", "worst", "mean error of memory", "worst"]
    return table(
        head,
        [
            [
                plan,
                str(len(found)),
                *(
                    f"{figure(errors):.1%}"
                    for errors in zip(*found, strict=True)
                    for figure in (statistics.mean, max)
                ),
            ]
            for plan, found in errors.items()
        ],
    )


def _summary(found: dict[str, Any], asked_of_memory: str) -> Iterator[str]:
    models = found["chosen_over_fastest"]
    yield (
        f"* Step time: mean error {found['mean_time_error']:.1%}, worst"
        f" {found['worst_time_error']:.1%} (asked: 10 %, 25 %); computing alone"
        f" {found['mean_compute_error']:.1%}."
    )
    yield (
        f"* Noise: the middle half of the steps spread by {found['mean_spread']:.1%}; predictions"
        f" by the machine before and after the steps are {found['mean_drift']:.1%} apart; other"
        f" programs took {found['mean_busy']:.0%} of the cores."
    )
    again = {model: times for model, times in found.get("measured_again", {}).items() if times > 1}
    if again:
        said = ", ".join(f"{model} {times} times" for model, times in again.items())
        yield f"* Measured until it was quiet, by steps and drift: {said}."
    if found["mean_spearman"] is not None:
        yield (
            f"* Order of a model's plans: Spearman {found['mean_spearman']:.2f} on average"
            f" (asked: 0.9){_against_itself(found)}."
        )
    yield (
        f"* In spite of noise {found['pairs_apart']} of {found['pairs']} pairs of a model's plans"
        f" are distinguishable; {found['pairs_apart_in_order']} of them"
        f" ({_part(found['pairs_apart_in_order'], found['pairs_apart'])}) come in the predicted"
        " order."
    )
    yield (
        f"* Peak memory: mean error {found['mean_memory_error']:.1%}, worst"
        f" {found['worst_memory_error']:.1%} (asked: {asked_of_memory})."
    )
    if not models:
        return
    yield (
        "* The chosen plan is the fastest measured one, or within 5 % of it, for"
        f" {found['chosen_within_5_percent']} of {len(models)} models (asked: 9 of 10); for"
        f" {found['chosen_within_noise']} no plan is faster by more than that and by more than"
        " noise."
    )


def _against_itself(found: dict[str, Any]) -> str:
    runs = found.get("mean_spearman_of_runs")
    return "" if runs is None else f"; of one run of ranks with another {runs:.2f}"


def _part(some: int, every: int) -> str:
    return f"{some / every:.0%}" if every else "none"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| model | plan | predicted ms | measured ms | error | spread | drift | computing |"
        " predicted MiB | measured MiB | error |"
    )
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        time = row["predicted_seconds"] / row["measured_seconds"] - 1
        compute = row["predicted_compute"] / row["measured_compute"] - 1
        memory = row["predicted_bytes"] / row["measured_bytes"] - 1
        yield (
            f"| {row['model']} | {row['plan']} | {row['predicted_seconds'] * 1e3:.1f} |"
            f" {row['measured_seconds'] * 1e3:.1f} | {time:+.0%} | {row['spread']:.0%} |"
            f" {row['drift']:+.0%} | {compute:+.0%} | {row['predicted_bytes'] / 2**20:.1f} |"
            f" {row['measured_bytes'] / 2**20:.1f} | {memory:+.0%} |"
        )


if __name__ == "__main__":
    print(written(), end="")
