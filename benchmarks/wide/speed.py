"""Plans that split a sequence, experts or a vocabulary beside the best that do not, measured.

    python -m benchmarks.wide.speed -o benchmarks/wide/speed.json

Small models are planned for two local ranks, for speed and under tighter limits of memory. Where
the chosen plan splits what is asked about it runs beside the best plan that does not, a step of
each in turn, in pairs whose order changes. Rows that the file has of this commit are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwright as sw
from benchmarks import record
from benchmarks.wide.models import SEED, Built, lengthy, mixtral, wordy
from benchmarks.wide.plans import both, line
from benchmarks.wide.ranks import on_ranks
from shardwright.ir.frontier import InfeasibleError
from shardwright.machine.files.toml import parse_toml, to_toml
from shardwright.machine.model import Machine
from shardwright.plan_io.plan_text import plan_to_json

RANKS = 2
LIMITS = (1.0, 0.8, 0.65)  # of what the fastest plan needs
_ALIKE = 1e-4  # how far losses may be apart, relatively
_ROUNDS = {"sequence": 9, "experts": 30, "vocabulary": 30}
MODELS: dict[str, tuple[Callable[[], Built], tuple[str, ...]]] = {  # and the words of the split
    "sequence": (lengthy, ("sequence",)),
    "experts": (mixtral, ("experts",)),
    "vocabulary": (wordy, ("vocabulary", "classes")),
}


def compared(
    name: str, machine: Machine, rounds: int, limits: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Of each memory limit the chosen plan beside the best one without the split, if it splits."""
    make, words = MODELS[name]
    model, batch = make()
    every, rest = both(sw.capture(model, (), batch), machine, words)
    most = every.fastest().peak_bytes
    measured: dict[str, dict[str, Any]] = {}
    for part in limits:
        limit = int(part * most)
        row: dict[str, Any] = {"model": name, "part": part, "memory_limit": limit}
        plans: list[sw.Plan] = []
        for what, frontier in (("chosen", every), ("other", rest)):
            try:
                plans.append(frontier.fastest(limit))
                row[what] = line(plans[-1], words)
            except InfeasibleError as e:
                row[what] = {"least_bytes": e.smallest_bytes}
        if len(plans) == 2 and row["chosen"].get("splits"):
            texts = [plan_to_json(plan) for plan in plans]
            key = "".join(texts)
            if key not in measured:
                measured[key] = ratios(on_ranks(RANKS, _timed, name, texts, rounds))
            row["measured"] = measured[key]
        yield row


def ratios(seconds: list[list[float]]) -> dict[str, Any]:
    """Medians and the ratio of two plans, of the seconds of each in every round."""
    chosen, other = seconds
    ratios = [a / b for a, b in zip(chosen, other, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rounds": len(ratios),
        "chosen_seconds": statistics.median(chosen),
        "other_seconds": statistics.median(other),
        "ratio": middle,
        "ratio_quartiles": [low, high],
    }


def _timed(name: str, texts: Sequence[str], rounds: int) -> list[list[float]]:
    return timed_in_turn(MODELS[name][0], texts, rounds)


def timed_in_turn(
    make: Callable[[], Built], texts: Sequence[str], rounds: int
) -> list[list[float]]:
    """Seconds of each plan's steps, the slowest rank's, in rounds whose order changes."""
    steps = [_stepper(make, text) for text in texts]
    for _ in range(2):
        first, second = (float(step()) for step in steps)
        if abs(first - second) > _ALIKE * abs(first):
            raise RuntimeError(f"losses differ: {first} and {second}")
    seconds = torch.zeros(len(steps), rounds, dtype=torch.float64)
    for number in range(rounds):
        for place in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            dist.barrier()
            start = time.perf_counter()
            steps[place]()
            seconds[place, number] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    found: list[list[float]] = seconds.tolist()
    return found


def _stepper(make: Callable[[], Built], text: str) -> Callable[[], Tensor]:
    model, batch = make()
    parallel = sw.parallelize(model, sw.Plan.from_json(text), tune_host=record.TUNE_HOST)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4, foreach=True)
    return lambda: parallel.train_step(optimizer, batch)


def main() -> None:
    """Compare, print a line each, write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, help="of pairs; by default what a model is worth")
    parser.add_argument("--limits", type=float, nargs="+", default=list(LIMITS))
    parser.add_argument("--fresh", action="store_true", help="measure again what the file has")
    options = parser.parse_args()
    rows = [] if options.fresh else record.rows_of_this_commit(options.output)
    machine: Machine
    if rows:
        machine = parse_toml(json.loads(options.output.read_text())["machine_file"])
    else:
        machine = sw.Machine.measure(RANKS, tune_host=record.TUNE_HOST)
    for name in options.models:
        have = {row["part"] for row in rows if row["model"] == name}
        limits = [part for part in options.limits if part not in have]
        for found in compared(name, machine, options.rounds or _ROUNDS[name], limits):
            rows.append({"commit": record.commit(), **found})
            print(rows[-1], flush=True)
            result = {"rows": rows, "machine_file": to_toml(machine)}
            record.write(result, options.output, SEED, tuned=record.TUNE_HOST)


if __name__ == "__main__":
    main()
