"""Accuracy of asynchronous pipelines: synchronous, stale, stashed and predicted weights.

    python -m benchmarks.spectrain_accuracy.run             # everything, in processes of one thread
    python -m benchmarks.spectrain_accuracy.run --quick     # two seeds, four stages, fewer steps
    python -m benchmarks.spectrain_accuracy.run --runs FILE # keep finished runs there, go on later
    python -m benchmarks.spectrain_accuracy.run --plot-only # the pictures again, from result.json

Learning rates suit synchronous training and are the same for all. A gap is
closed by 1 − (L − L_sync) / (L_stale − L_sync), L being the loss on what was
held out, meaned over the seeds; a run whose loss is no number, or more than
that of a uniform guess, has diverged and counts as such a guess. The record's
pictures go to docs/pictures, and `python -m benchmarks.page` writes the pages
that show them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.spectrain_accuracy.plot import draw
from benchmarks.spectrain_accuracy.subjects import SUBJECTS
from benchmarks.spectrain_accuracy.training import Run, prediction_errors, train
from shardwright.ir.schedules.weight_versions import WEIGHTS

HERE = Path(__file__).parent
OPTIMIZERS = ("momentum", "adamw")
GUESS = {"transformer": math.log(256), "lstm": math.log(256), "digits": math.log(10)}
FURTHEST = 8
DISCOUNTED, DISCOUNT = ("stale", "spectrain"), 0.5  # of the steps, until there is none
PICTURES = HERE.parents[1] / "docs" / "pictures"


def runs(seeds: int, steps: int, pipelines: tuple[int, ...]) -> list[Run]:
    """Every combination; synchronous training has no stages."""
    found = []
    for seed in range(seeds):
        for subject in SUBJECTS:
            for optimizer in OPTIMIZERS:
                found.append(Run(subject, optimizer, 1, "synchronous", seed, steps))
                found += [
                    Run(subject, optimizer, stages, weights, seed, steps)
                    for stages in pipelines
                    for weights in WEIGHTS
                ]
                found += [
                    Run(subject, optimizer, n, weights, seed, steps, discount=int(DISCOUNT * steps))
                    for n in pipelines
                    for weights in DISCOUNTED
                ]
    return found


def summary(results: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and spread over the seeds, the mean curve, and the share of the gap that is closed."""
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for run, result in results.items():
        groups[run.subject, run.optimizer, run.stages, run.contestant].append(result)
    means = {key: statistics.mean(_loss(r) for r in group) for key, group in groups.items()}
    found = []
    for (subject, optimizer, stages, weights), group in groups.items():
        losses = [_loss(result) for result in group]
        row: dict[str, Any] = {
            "subject": subject,
            "optimizer": optimizer,
            "stages": stages,
            "weights": weights,
            "held_out": statistics.mean(losses),
            "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
            "diverged": sum(not result["held_out"] < GUESS[subject] for result in group),
            "curve": [
                round(statistics.mean(_finite(loss, subject) for loss in at_step), 5)
                for at_step in zip(*(result["losses"] for result in group), strict=True)
            ],
        }
        if "accuracy" in group[0]:
            accuracies = [result["accuracy"] for result in group]
            row["accuracy"] = statistics.mean(accuracies)
            row["accuracy_spread"] = statistics.stdev(accuracies) if len(group) > 1 else 0.0
        if weights != "synchronous":
            best = means[subject, optimizer, 1, "synchronous"]
            gap = means[subject, optimizer, stages, "stale"] - best
            row["gap_closed"] = 1 - (row["held_out"] - best) / gap if gap > 0 else None
        found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as text."""
    lines = [
        "subject      optimizer  N  weights                held-out loss    closed  accuracy"
        "  diverged"
    ]
    for row in rows:
        closed = row.get("gap_closed")
        accuracy = f"{row['accuracy']:8.3f}" if "accuracy" in row else " " * 8
        lines.append(
            f"{row['subject']:12} {row['optimizer']:9} {row['stages']:2}  {row['weights']:21}"
            f" {row['held_out']:6.3f} ± {row['spread']:.3f}"
            f" {f'{closed:8.0%}' if closed is not None else ' ' * 8}  {accuracy}"
            f"  {row['diverged'] or ''}".rstrip()
        )
    return "\n".join(lines)


def _kept(path: Path | None) -> dict[Run, dict[str, Any]]:
    """Runs that a file has results of; fields that came later have their defaults."""
    if path is None or not path.exists():
        return {}
    names = [field.name for field in fields(Run)]
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {Run(**{n: result[n] for n in names if n in result}): result for result in results}


def _keep(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _loss(result: dict[str, Any]) -> float:
    return _finite(result["held_out"], result["subject"])


def _finite(loss: float, subject: str) -> float:
    """The loss, at most that of a uniform guess."""
    return min(loss, GUESS[subject]) if math.isfinite(loss) else GUESS[subject]


def main() -> None:
    """Run, print the table, write the result, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("--runs", type=Path, help="JSON lines of finished runs, kept and read")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    options = parser.parse_args()
    # Pictures of the record are those of the documentation.
    pictures = PICTURES if options.out.resolve() == HERE / "result.json" else options.out.parent
    if options.plot_only:
        draw(json.loads(options.out.read_text()), pictures)
        return
    pipelines: tuple[int, ...] = (4, 8)
    if options.quick:
        options.seeds, options.steps, pipelines = 2, 80, (4,)
    os.environ["OMP_NUM_THREADS"] = "1"
    wanted = runs(options.seeds, options.steps, pipelines)
    done = _kept(options.runs)
    todo = [run for run in wanted if run not in done]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context) as pool:
        errors = {
            optimizer: pool.submit(
                prediction_errors,
                Run("transformer", optimizer, max(pipelines), "spectrain", 0, options.steps),
                FURTHEST,
            )
            for optimizer in OPTIMIZERS
        }
        for number, (run, result) in enumerate(
            zip(todo, pool.map(train, todo), strict=True), start=1
        ):
            done[run] = result
            _keep(options.runs, result)
            print(f"\r{number} of {len(todo)} runs", end="", flush=True)
        found: dict[str, Any] = {
            "claim": "prediction closes at least half of the gap from stale to synchronous",
            "options": {"seeds": options.seeds, "steps": options.steps},
            "rows": summary({run: done[run] for run in wanted}),
            "prediction_errors": {name: error.result() for name, error in errors.items()},
        }
    print("\n" + table(found["rows"]))
    record.write(found, options.out, 0)
    draw(found, pictures)


if __name__ == "__main__":
    main()
