"""The chosen plan against the best baseline that fits, over all models of the zoo.

    python -m benchmarks.never_worse.run -o benchmarks/never_worse/result.json
    python -m benchmarks.never_worse.run -o /tmp/some.json --models gpt2 vit --machines 2xcpu

Models have their published sizes and are built on the meta device. A row is one model on one
machine under one memory limit. `ratio` is the chosen plan's time over the best baseline's, `gap`
how far above its lower bound the chosen plan may be.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import shardwright as sw
from benchmarks import record
from shardwright.ir.frontier import Frontier, InfeasibleError
from shardwright.ir.graph import Graph
from shardwright.ir.layout import Seconds
from shardwright.machine.model import Machine
from shardwright.machine.presets import preset
from tests.zoo import ZOO

SEED = 0
_GBIT = 1e9 / 8


def _v100_on_ethernet() -> Machine:
    """Four V100s, each in a host of its own, on 10 Gbit/s, of which 80 % are reached."""
    four = preset("4xV100")
    (link,) = four.levels
    network = replace(
        link, name="ethernet", bytes_per_s=0.8 * 10 * _GBIT, latency_seconds=Seconds(50e-6)
    )
    return replace(four, name="4xV100 on 10 Gbit/s", levels=(network,))


MACHINES = {
    "8xH100": preset("8xH100"),
    "4x8xA100": preset("4x8xA100"),
    "4xV100-10G": _v100_on_ethernet(),
    "2xcpu": preset("2xcpu"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One choice, and the best of the baselines that fit; none may fit."""

    model: str
    machine: str
    limit: str
    limit_bytes: int
    chosen: str
    seconds: float
    peak_bytes: int
    gap: float
    baseline: str
    ratio: float | None


def rows(model: str, machine: str, frontier: Frontier) -> Iterator[Row]:
    """The choice under three limits: the device's memory, and two between the baselines' needs.

    Limits are what baselines add up to; whether one fits is a matter of what it really needs.

    Raises `InfeasibleError` where a baseline fits and no plan does.
    """
    peaks = sorted(b.peak_bytes for b in frontier.baselines)
    limits = {
        "device": MACHINES[machine].device.memory_bytes,
        "median baseline": int(statistics.median_high(peaks)),
        "smallest baseline": peaks[0],
    }
    settled = [frontier.settled(b) for b in frontier.baselines]
    for name, limit in limits.items():
        fitting = [b for b in settled if b.peak_bytes <= limit]
        try:
            chosen = frontier.fastest(limit)
        except InfeasibleError:
            if fitting:
                raise
            continue
        best = min(fitting, key=lambda b: b.step_seconds, default=None)
        yield Row(
            model,
            machine,
            name,
            limit,
            f"{chosen.name} ({chosen.mesh})",
            chosen.step_seconds,
            chosen.peak_bytes,
            chosen.step_seconds / chosen.lower_bound_seconds - 1,
            f"{best.name} ({best.mesh})" if best else "none fits",
            chosen.step_seconds / best.step_seconds if best else None,
        )


def captured(model: str) -> Graph:
    """The serial graph of a model of the zoo at its published size."""
    with torch.device("meta"):
        module, batch = ZOO[model](True)
    return sw.capture(module, (), batch)


def main() -> None:
    """Measure the chosen models and machines, print them and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(SEED)
    found: list[Row] = []
    for model in given.models:
        graph = captured(model)
        for machine in given.machines:
            start = time.perf_counter()
            mine = list(rows(model, machine, sw.search(graph, MACHINES[machine])))
            found += mine
            ratios = ", ".join(
                "no baseline fits" if r.ratio is None else f"{r.ratio:.4f}" for r in mine
            )
            print(
                f"{model} on {machine}: {ratios} ({time.perf_counter() - start:.1f} s)", flush=True
            )
    compared = [row.ratio for row in found if row.ratio is not None]
    summary = {
        "models": len(given.models),
        "choices": len(found),
        "compared": len(compared),
        "worst_ratio": max(compared),
        "median_ratio": statistics.median(compared),
        "best_ratio": min(compared),
        "largest_gap": max(row.gap for row in found),
        "median_gap": statistics.median(row.gap for row in found),
        "chosen_are_baselines": sum(not row.chosen.startswith("searched") for row in found),
    }
    print(summary)
    record.write({**summary, "rows": [asdict(row) for row in found]}, given.output, SEED)
    if max(compared) > 1:
        raise SystemExit("a chosen plan is slower than a baseline that fits")


if __name__ == "__main__":
    main()
