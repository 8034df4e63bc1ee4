"""A step in micro-batches with fully sharded parameters, of this commit against an earlier one.

    python -m benchmarks.micro_batches.run -o benchmarks/micro_batches/result.json

Hosts of one rank each are joined by links of 1 Gbit/s (`benchmarks/hosts`). Ranks of both commits
are alive on all of them, each running the package of its own work tree of git, and take single
steps in turn, in an order that changes; while ranks of one commit take a step, those of the other
sleep. Both train the same model by their fully sharded baseline with the same number of
micro-batches, and must end with the same losses. Reported are the medians of the step times, of
which the slower rank's counts, median and quartiles of the ratios of neighbouring steps, and the
least time in which the link sends what a rank sends in a step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.hosts import Cluster, Link, hosts
from benchmarks.hosts.network import DEVICE, address
from benchmarks.micro_batches.worker import MODELS, plan_of
from benchmarks.work_tree import work_tree
from shardwright.ir.redistribution import collective_named

SEED, TARGET = 0, 1.5
BEFORE = "83c3193"
BIT_PER_S = 1e9
SIDES = ("before", "now")
PORTS = {"before": 29500, "now": 29501}
WARM_UP = 2  # rounds that do not count
_ALIKE = 1e-3  # how far losses may be apart, relatively
_START_SECONDS = 300.0  # for imports, capture and the first step, on a busy machine
_STEP_SECONDS = 120.0
_KILLED_SECONDS = 10.0


@dataclass
class Ranks:
    """The ranks of one commit, one on each host, which take a step when they are told to."""

    side: str
    folder: Path
    processes: list[subprocess.Popen[bytes]]
    outputs: list[Path]
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, limit: float) -> None:
        """Take a step and record its time; raises `RuntimeError` if it takes over `limit` s."""
        (self.folder / f"{self.side}.{self.steps}").touch()
        names = [f"{self.side}.{self.steps}.rank{r}" for r in range(len(self.processes))]
        end = time.monotonic() + limit
        while not all((self.folder / name).exists() for name in names):
            ended = [i for i, one in enumerate(self.processes) if one.poll() is not None]
            if ended or time.monotonic() > end:
                why = f"rank {ended[0]} ended" if ended else f"no step within {limit:g} s"
                said = self.outputs[ended[0] if ended else 0].read_text(errors="replace")
                raise RuntimeError(f"{self.side}: {why}:\n{said[-4000:]}")
            time.sleep(0.002)
        found = [(self.folder / name).read_text().split() for name in names]
        self.seconds.append(max(float(seconds) for seconds, _ in found))
        self.losses.append(float(found[0][1]))
        self.steps += 1


def start(
    cluster: Cluster, side: str, tree: Path, folder: Path, options: list[str], opened: ExitStack
) -> Ranks:
    """Start the ranks of one commit; they end with `opened`."""
    processes, outputs = [], []
    worker = str(Path(__file__).with_name("worker.py"))
    given = ["--tree", str(tree), "--folder", str(folder), "--side", side, *options]
    for host in range(len(cluster)):
        outputs.append(folder / f"{side}.output{host}")
        out: IO[bytes] = opened.enter_context(outputs[-1].open("wb"))
        environment = {
            "PYTHONPATH": str(tree),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": DEVICE,
            "MASTER_ADDR": address(0),
            "MASTER_PORT": str(PORTS[side]),
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(cluster)),
            "LOCAL_WORLD_SIZE": "1",
        }
        command = [sys.executable, worker, *given]
        process = cluster.start(host, command, out, environment, tree)
        opened.callback(_end, process)
        processes.append(process)
    return Ranks(side, folder, processes, outputs)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):  # once it is told that there are no more steps
        process.wait(_KILLED_SECONDS)
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILLED_SECONDS)


def compare(
    cluster: Cluster, trees: dict[str, Path], model: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One model's row."""
    given = ["--model", model, "--micro-batches", str(options.micro_batches)]
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        sides = [start(cluster, side, trees[side], folder, given, opened) for side in SIDES]
        opened.callback((folder / "end").touch)
        for one in sides:
            one.step(_START_SECONDS)
        end = time.monotonic() + options.seconds
        rounds = 0
        while rounds < WARM_UP + options.rounds or time.monotonic() < end:
            for one in sides if rounds % 2 else reversed(sides):
                one.step(_STEP_SECONDS)
            rounds += 1
    before, now = sides
    for a, b in zip(before.losses, now.losses, strict=True):
        if abs(a - b) > _ALIKE * abs(a):
            raise RuntimeError(f"losses of {model} differ: {a} before, {b} now")
    return row(model, before.seconds[1 + WARM_UP :], now.seconds[1 + WARM_UP :])


def row(model: str, before: list[float], now: list[float]) -> dict[str, Any]:
    """Medians, and those of ratios of neighbouring steps."""
    ratios = [a / b for a, b in zip(before, now, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "model": model,
        "rounds": len(ratios),
        "before_seconds": statistics.median(before),
        "now_seconds": statistics.median(now),
        "times_faster": middle,
        "quartiles": [low, high],
    }


def link_seconds(model: str, hosts: int, micro_batches: int, bit_per_s: float) -> float:
    """The least seconds in which a link sends what a rank of this commit sends in a step."""
    torch.manual_seed(SEED)
    module, batch = MODELS[model]()
    plan = plan_of(sw.capture(module, (), batch), hosts, micro_batches)
    sent: float = sum(
        sent_part(text.split(" ")[0], hosts) * one.bytes * one.times
        for one in plan.transfers
        for text in one.collectives
    )
    return sent / (bit_per_s / 8)


def sent_part(kind: str, ranks: int) -> float:
    """The part of a whole tensor that each of `ranks` sends in a collective."""
    crossing = collective_named(kind).crossing(ranks)
    return (crossing.before + crossing.after) / ranks


def main() -> None:
    """Measure all models, print a line each, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbit-per-s", type=float, default=BIT_PER_S / 1e9)
    parser.add_argument("--rounds", type=int, default=8, help="of both, at least")
    parser.add_argument(
        "--seconds", type=float, default=45, help="for a model, if rounds are short"
    )
    options = parser.parse_args()
    rows = []
    link = Link(bit_per_s=options.gbit_per_s * 1e9)
    with work_tree(options.before) as earlier, hosts(options.hosts, link) as cluster:
        trees = {"before": earlier, "now": record.ROOT}
        for model in options.models:
            one = compare(cluster, trees, model, options)
            bit_per_s = options.gbit_per_s * 1e9
            one["link_seconds"] = link_seconds(
                model, options.hosts, options.micro_batches, bit_per_s
            )
            rows.append(one)
            low, high = one["quartiles"]
            print(
                f"{model:6} before {one['before_seconds']:.3f} s, now {one['now_seconds']:.3f}:"
                f" {one['times_faster']:.2f} times faster ({low:.2f} to {high:.2f})",
                flush=True,
            )
    found = {
        "target": TARGET,
        "before": options.before,
        "micro_batches": options.micro_batches,
        "hosts": options.hosts,
        "gbit_per_s": options.gbit_per_s,
        "rows": rows,
    }
    record.write(found, options.output, SEED, tuned=True)


if __name__ == "__main__":
    main()
