"""Step times on hosts joined by slow links: our plan against DDP, FSDP2, Megatron's and a hybrid.

    python -m benchmarks.soybean.run -o benchmarks/soybean/result.json

For each number of hosts and each bandwidth the hosts are measured as a user would, by `shardwright
profile`; our plans are searched for on what was found. Then all contestants take steps in turn on
the same hosts. Reported are medians of the rivals' times over ours in the same round, with
quartiles. Networks may be narrower than published (`models.py`), batches are as stated.

The result is written after each set of hosts. Rows that it has of this commit are kept, so the same
command goes on where it was (`--fresh`: from the start); after `--minutes` nothing new is begun.
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
from benchmarks.hosts import Cluster, HostError, HostsUnavailableError, Link, hosts
from benchmarks.hosts.measured import measured
from benchmarks.soybean.contestants import OURS, RIVALS
from benchmarks.soybean.models import MODELS, made
from benchmarks.soybean.worker import Subject, Task, measured_file
from shardwright.machine.files.toml import to_toml
from shardwright.machine.model import Machine
from shardwright.plan_io.plan_text import plan_to_json

SEED = 0
_START_SECONDS = 300.0  # allowance to start, import, capture and warm up
_ROW_SECONDS = 120.0  # the same for each network

SUBJECTS = (
    Subject("alexnet", 1.0, 64),
    Subject("vgg16", 0.125, 8),
    Subject("vgg16", 0.125, 32),
    Subject("mlp", 0.125, 128),
)
ALL = (*SUBJECTS, Subject("alexnet", 1.0, 128), Subject("vgg16", 0.125, 64))
QUICK = (Subject("alexnet", 0.125, 64),)


@dataclass(frozen=True, slots=True)
class Row:
    """One network on so many hosts. `ratios`: a rival's time over ours: quartiles and median."""

    model: str
    scale: float
    batch: int
    hosts: int
    bit_per_s: float
    commit: str
    rounds: int
    mesh: str
    predicted_seconds: float
    seconds: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]

    @property
    def subject(self) -> Subject:
        return Subject(self.model, self.scale, self.batch)

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


def rows(
    cluster: Cluster, machine: Machine, subjects: Sequence[Subject], seconds: float, until: float
) -> list[Row]:
    """Plan, run, compare; those that were done in time, and before any host failed."""
    plans = []
    for one in subjects:
        model, batch = made(one.model, one.scale, one.batch)
        plans.append(sw.plan(model, (), batch, machine=machine, optimizer="momentum"))
    texts = tuple(plan_to_json(plan) for plan in plans)
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        Task(tuple(subjects), texts, tuple(RIVALS), seconds, least=3, until=until).write(file)
        limit = _START_SECONDS + len(subjects) * (_ROW_SECONDS + 10 * seconds)
        try:
            cluster.torchrun("benchmarks.soybean.worker", str(file), timeout_seconds=limit)
        except HostError as e:
            print(f"soybean: {e}", file=sys.stderr, flush=True)
        for number, (one, plan) in enumerate(zip(subjects, plans, strict=True)):
            if (done := measured_file(file, number)).exists():
                found.append(_row(cluster, one, plan, json.loads(done.read_text())))
    return found


def _row(cluster: Cluster, subject: Subject, plan: sw.Plan, took: dict[str, list[float]]) -> Row:
    ratios = {
        name: _quartiles([r / o for r, o in zip(took[name], took[OURS], strict=True)])
        for name in RIVALS
    }
    return Row(
        **asdict(subject),
        hosts=len(cluster),
        bit_per_s=cluster.link.bit_per_s,
        commit=record.commit(),
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
    """Measure all rows, print a line each, write the result; exit status 1 if any is missing."""
    options = _options()
    try:
        missing = _measure(options)
    except HostsUnavailableError as e:
        print(f"soybean: skipped, {e}", file=sys.stderr)
        return
    if missing:
        print("soybean: not measured:", *missing, sep="\n  ", file=sys.stderr)
        sys.exit(1)


def _measure(options: argparse.Namespace) -> list[str]:
    """What was not measured; what was is in the file."""
    until = time.time() + 60 * options.minutes
    subjects = QUICK if options.quick else ALL if options.all else SUBJECTS
    asked = [one for one in subjects if one.model in options.models]
    kept, machines = _known(options.output) if not options.fresh else ([], {})
    missing = []
    for count in options.hosts:
        for gbit in options.gbit_per_s:
            link = Link(gbit * 1e9)
            have = {
                row.subject for row in kept if (row.hosts, row.bit_per_s) == (count, link.bit_per_s)
            }
            left = [one for one in asked if one not in have]
            if left and time.time() < until:
                with hosts(count, link) as cluster:
                    machine = measured(cluster, options.profile_seconds)
                    machines[f"{count} hosts, {link}"] = to_toml(machine)
                    found = rows(cluster, machine, left, options.seconds, until)
                print(*found, sep="\n", flush=True)
                kept += found
                left = [one for one in left if one not in {row.subject for row in found}]
                result: dict[str, Any] = {"rows": [asdict(row) for row in kept]}
                record.write(
                    {**result, "measured_machines": machines},
                    options.output,
                    SEED,
                    tuned=record.TUNE_HOST,
                )
            missing += [f"{one} on {count} hosts, {link}" for one in left]
    return missing


def _known(file: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows of this commit that a file has, if there is one."""
    if not file.exists():
        return [], {}
    result = json.loads(file.read_text())
    here = record.commit()
    found = [Row(**row) for row in result["rows"] if row.get("commit") == here]
    return found, result["measured_machines"] if found else {}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="a smaller network, 2 hosts, 0.1 Gbit/s"
    )
    parser.add_argument("--all", action="store_true", help="also the batches of the paper")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file has")
    parser.add_argument("--minutes", type=float, default=25.0, help="then nothing new is begun")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--hosts", type=int, nargs="+")
    parser.add_argument("--gbit-per-s", type=float, nargs="+")
    parser.add_argument("--seconds", type=float, help="of steps for a row")
    parser.add_argument("--profile-seconds", type=float)
    options = parser.parse_args()
    options.hosts = options.hosts or ([2] if options.quick else [4, 2])
    options.gbit_per_s = options.gbit_per_s or ([0.1] if options.quick else [0.1, 1.0])
    options.seconds = options.seconds or (3.0 if options.quick else 10.0)
    options.profile_seconds = options.profile_seconds or (5.0 if options.quick else 15.0)
    return options


if __name__ == "__main__":
    main()
