"""Step times on hosts joined by slow links: our plan against DDP, FSDP2, Megatron's and a hybrid.

    python -m benchmarks.soybean.run -o benchmarks/soybean/result.json

For each number of hosts and each bandwidth the hosts are measured as a user would, by `shardwright
profile`; our plan is searched for on what was found. Then all contestants take steps in turn on
the same hosts. Reported are medians of the rivals' times over ours in the same round, with
quartiles. Networks are narrower than published (`models.py`), batches are as stated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shardwright as sw
from benchmarks import record
from benchmarks.hosts import Cluster, HostsUnavailableError, Link, hosts
from benchmarks.hosts.measured import measured
from benchmarks.soybean.contestants import OURS, RIVALS
from benchmarks.soybean.models import MODELS, made
from benchmarks.soybean.worker import Task

SEED = 0
_START_SECONDS = 300.0  # allowance to start, import, capture and warm up


@dataclass(frozen=True, slots=True)
class Subject:
    """A network at a scale and a global batch."""

    model: str
    scale: float
    batch: int


SUBJECTS = (
    Subject("alexnet", 0.25, 64),
    Subject("vgg16", 0.125, 32),
    Subject("mlp", 0.125, 128),
)
ALL = (*SUBJECTS, Subject("alexnet", 0.25, 128), Subject("vgg16", 0.125, 64))
QUICK = (Subject("alexnet", 0.125, 64), Subject("mlp", 0.0625, 128))


@dataclass(frozen=True, slots=True)
class Row:
    """One network on so many hosts. `ratios`: a rival's time over ours: quartiles and median."""

    model: str
    scale: float
    batch: int
    hosts: int
    bit_per_s: float
    rounds: int
    mesh: str
    predicted_seconds: float
    seconds: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]

    def __str__(self) -> str:
        against = ", ".join(
            f"{name} {middle:.2f}x ({low:.2f} to {high:.2f})"
            for name, (low, middle, high) in self.ratios.items()
        )
        return (
            f"{self.model} {self.batch} on {self.hosts} hosts, {self.bit_per_s / 1e9:g} Gbit/s:"
            f" ours {self.seconds[OURS] * 1e3:.0f} ms ({self.predicted_seconds * 1e3:.0f}"
            f" predicted, {self.mesh}); {against}"
        )


def row(cluster: Cluster, machine: sw.Machine, subject: Subject, seconds: float) -> Row:
    """Plan, run, compare."""
    model, batch = made(subject.model, subject.scale, subject.batch)
    plan = sw.plan(model, (), batch, machine=machine, optimizer="sgd")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        Task(
            **asdict(subject), plan=plan.to_json(), rivals=tuple(RIVALS), seconds=seconds, least=3
        ).write(file)
        cluster.torchrun(
            "benchmarks.soybean.worker", str(file), timeout_seconds=_START_SECONDS + 10 * seconds
        )
        took: dict[str, list[float]] = json.loads(file.with_suffix(".measured").read_text())
    ratios = {
        name: _quartiles([r / o for r, o in zip(took[name], took[OURS], strict=True)])
        for name in RIVALS
    }
    return Row(
        **asdict(subject),
        hosts=len(cluster),
        bit_per_s=cluster.link.bit_per_s,
        rounds=len(took[OURS]),
        mesh=str(plan.mesh),
        predicted_seconds=plan.step_seconds,
        seconds={name: statistics.median(times) for name, times in took.items()},
        ratios=ratios,
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    """Measure all rows, print a line each, write the result."""
    options = _options()
    try:
        result = _result(options)
    except HostsUnavailableError as e:
        print(f"soybean: skipped, {e}", file=sys.stderr)
        return
    record.write(result, options.output, SEED)


def _result(options: argparse.Namespace) -> dict[str, Any]:
    subjects = QUICK if options.quick else ALL if options.all else SUBJECTS
    rows, machines = [], {}
    start = time.monotonic()
    for count in options.hosts:
        for gbit in options.gbit_per_s:
            with hosts(count, Link(gbit * 1e9)) as cluster:
                machine = measured(cluster, options.profile_seconds)
                machines[f"{count} hosts, {cluster.link}"] = machine.to_toml()
                for subject in subjects:
                    if subject.model in options.models:
                        rows.append(row(cluster, machine, subject, options.seconds))
                        print(rows[-1], flush=True)
    return {
        "rows": [asdict(found) for found in rows],
        "measured_machines": machines,
        "seconds": time.monotonic() - start,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="smaller networks, 2 hosts, 0.1 Gbit/s"
    )
    parser.add_argument("--all", action="store_true", help="also the batches of the paper")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--gbit-per-s", type=float, nargs="+")
    parser.add_argument("--seconds", type=float, help="of steps for a row")
    parser.add_argument("--profile-seconds", type=float, default=15.0)
    options = parser.parse_args()
    options.hosts = options.hosts or ([2] if options.quick else [2, 4])
    options.gbit_per_s = options.gbit_per_s or ([0.1] if options.quick else [0.1, 1.0])
    options.seconds = options.seconds or (5.0 if options.quick else 10.0)
    return options


if __name__ == "__main__":
    main()
