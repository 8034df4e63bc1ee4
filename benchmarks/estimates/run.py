"""Predicted against measured: step time and peak memory of four plans for each of ten models.

    python -m benchmarks.estimates.run -o benchmarks/estimates/result.json --page docs/estimates.md
    python -m benchmarks.estimates.run -o /tmp/some.json --models mlp vgg --rounds 5 --seconds 5

Two local processes of one thread each; the machine is measured right before each model, and
again at the end: what changes between is noise that no estimate can know. Steps of a model's plans
are taken in turn. A row's time is the median of the slower rank's steps, its memory the larger of
the ranks'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from scipy.stats import spearmanr

import shardwright as sw
from benchmarks import record
from benchmarks.estimates import page, worker
from benchmarks.estimates.models import MODELS
from shardwright.ir.machine import Machine
from shardwright.ir.plan import Plan

SEED, RANKS = 0, 2
BASELINES = ("data parallel", "fully sharded", "tensor parallel")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one model. `spread` is how far the middle half of the steps are apart."""

    model: str
    plan: str
    mesh: str
    predicted_seconds: float
    measured_seconds: float
    spread: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def measured(folder: Path, seconds: float) -> Machine:
    """This host, as `shardwright profile` sees it in a process of its own."""
    file = folder / "machine.toml"
    cli = "from shardwright.cli import main; main()"
    given = ["--devices", str(RANKS), "--seconds", str(seconds), "--json"]
    command = [sys.executable, "-c", cli, "profile", "-o", str(file), *given]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Machine.load(file)


def plans_of(name: str, machine: Machine) -> list[Plan]:
    """The chosen plan and the baselines of `BASELINES`."""
    torch.manual_seed(SEED)
    model, batch = MODELS[name]()
    frontier = sw.search(sw.capture(model, (), batch), machine)
    known = {plan.name: plan for plan in frontier.baselines}
    return [frontier.fastest(), *(known[name] for name in BASELINES if name in known)]


def rows_of(name: str, plans: Sequence[Plan], rounds: int) -> list[Row]:
    """Take the steps and compare."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        texts = [plan.to_json() for plan in plans]
        mp.spawn(worker.run, (RANKS, store, name, texts, rounds), nprocs=RANKS)
        ranks = torch.load(f"{store}.measured", weights_only=False)  # our own, a moment old
    rows = []
    for place, plan in enumerate(plans):
        measured = [found[place] for found in ranks]
        seconds = [max(step) for step in zip(*(m.seconds for m in measured), strict=True)]
        low, middle, high = statistics.quantiles(seconds, n=4)
        rows.append(
            Row(
                model=name,
                plan="chosen" if place == 0 else plan.name,
                mesh=str(plan.mesh),
                predicted_seconds=plan.step_seconds,
                measured_seconds=middle,
                spread=(high - low) / middle,
                predicted_bytes=plan.peak_bytes,
                measured_bytes=max(m.bytes for m in measured),
            )
        )
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that the estimates are held to."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    times = [abs(row.time_error) for row in rows]
    memory = [abs(row.memory_error) for row in rows]
    orders = [_order(found) for found in by_model.values() if len(found) > 1]
    fastest = [
        found[0].measured_seconds / min(row.measured_seconds for row in found)
        for found in by_model.values()
    ]
    return {
        "mean_time_error": statistics.mean(times),
        "worst_time_error": max(times),
        "mean_spearman": statistics.mean(orders) if orders else None,
        "mean_memory_error": statistics.mean(memory),
        "worst_memory_error": max(memory),
        "chosen_over_fastest": dict(zip(by_model, fastest, strict=True)),
        "chosen_within_5_percent": sum(ratio <= 1.05 for ratio in fastest),
        "mean_spread": statistics.mean(row.spread for row in rows),
    }


def _order(rows: Sequence[Row]) -> float:
    """Spearman's correlation of predicted and measured times; plans that are one plan agree."""
    predicted = [row.predicted_seconds for row in rows]
    if len(set(predicted)) == 1:
        return 1.0
    return float(spearmanr(predicted, [row.measured_seconds for row in rows]).statistic)


def main() -> None:
    """Measure, compare, write."""
    options = _options()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    rows: list[Row] = []
    machines = []
    with tempfile.TemporaryDirectory() as cache:
        for name in options.models:
            machine = measured(Path(cache), options.seconds)
            machines.append(machine)
            found = rows_of(name, plans_of(name, machine), options.rounds)
            for row in found:
                print(
                    f"{row.model:9} {row.plan:16} {row.predicted_seconds * 1e3:8.1f} ms predicted,"
                    f" {row.measured_seconds * 1e3:8.1f} measured ({row.time_error:+.0%}, spread"
                    f" {row.spread:.0%}); {row.predicted_bytes / 2**20:7.1f} MiB,"
                    f" {row.measured_bytes / 2**20:7.1f} ({row.memory_error:+.0%})",
                    flush=True,
                )
            rows += found
    peaks = [machine.device.peak_flop_per_s("float32") for machine in machines]
    result = {
        "rows": [asdict(row) for row in rows],
        "summary": summary(rows),
        "measured_machine": machines[-1].to_toml(),
        "peak_over_all_measurements": {"least": min(peaks), "most": max(peaks)},
    }
    record.write(result, options.output, SEED)
    if options.page:
        options.page.write_text(page.written(options.output))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="also write the table as Markdown")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="for one measurement")
    return parser.parse_args()


if __name__ == "__main__":
    main()
