"""Random `kill -9` of random ranks: the run always goes on from a complete checkpoint.

    python -m benchmarks.kills.run --kills 200

One job trains on two ranks, under each kind of plan in turn. It saves every other step in the
background, and torchrun starts the ranks again whenever one dies. A third of the kills come while
a checkpoint is being written, a third at a random moment after a step, the others at a random
moment after the ranks were started. After each kill the latest checkpoint is read. At the end the
losses of all steps are compared with those of a run of the same plan that nobody disturbed.

Kills come in runs of ten. The result is written after each run, and what is there already
of the same commit and seed is not done again, unless with `--fresh`. It takes about an hour on
two idle cores, and begins no further run after `--minutes`: fewer kills count as failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import shardwright as sw
from benchmarks import record
from shardwright.ir.plan import Plan
from shardwright.runtime.weight_files.dcp_index import read_index
from shardwright.train.checkpoint.folder import CheckpointFolder
from shardwright.train.launch import Training, launch
from shardwright.train.launch_options import LaunchOptions, SaveOptions
from shardwright.train.targets.target import load_job
from shardwright.train.targets.target_text import Target

SEED = 0
RANKS, EVERY = 2, 2
EACH = 10  # kills of a run
STANDING = 120.0  # seconds after which ranks that stand still end themselves
PATIENCE = 3 * STANDING  # seconds for a restart on a busy machine
MOST_STEPS = 8  # that a run goes on after a start before a rank is killed
STEPS_PER_KILL = 12  # so that all are killed before the end
TOO_LATE = 124  # the status of a run that was ended for its time
_STOOD = re.compile("shardwright: (no step was done|the start did not go on)")
WAYS = "while saving", "after a step", "after the start"
ASYNC = "asynchronous pipeline"
KINDS = {
    "fully sharded": "dp_shard=2",
    "tensor parallel": "tp=2",
    "pipeline": "pp=2:1F1B mb=2",
    ASYNC: "",
    "sharded, in micro-batches": "dp_shard=2 mb=2",
    "data parallel": "dp_replicate=2",
}
JOB = """
import time

import torch
from torch import nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 512), nn.Dropout(0.2), nn.Linear(512, 64)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


def data(pause):
    while True:
        time.sleep(pause)
        yield {"x": torch.randn(8, 64)}


def job(pause=0.0):
    return sw.Job(Net, {"x": torch.zeros(8, 64)}, lambda p: torch.optim.AdamW(p, lr=0.01),
                  lambda: data(pause), 10_000, clip_norm=1.0)
"""


class StandsStillError(RuntimeError):
    """Ranks neither go on nor end themselves."""


@dataclass
class Killer:
    """Stands between `launch` and the processes: kills ranks until `kills` have died."""

    kills: int
    folder: CheckpointFolder
    chance: random.Random
    seconds: float  # that a start takes about, as far as known
    done: Counter[str] = field(default_factory=Counter)
    torn: list[str] = field(default_factory=list)  # of checkpoints that could not be read

    def __call__(self, command: Sequence[str], env: Mapping[str, str], out: TextIO | None) -> int:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            before: list[int] = []
            while sum(self.done.values()) < self.kills:
                before = self._ranks(process, before)
                way = self.chance.choice(WAYS)
                if not self._moment(way, process):
                    break
                try:
                    os.kill(self.chance.choice(before), signal.SIGKILL)
                except ProcessLookupError:  # it had ended by itself
                    continue
                self.done[way] += 1
                print(f"kill {sum(self.done.values())} {way}: {self._latest()}", flush=True)
            return process.wait(PATIENCE)
        except (StandsStillError, subprocess.TimeoutExpired) as e:
            print(f"given up: {e}", flush=True)
            return TOO_LATE
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()

    def _ranks(self, process: subprocess.Popen[bytes], before: list[int]) -> list[int]:
        """The ranks' processes, when all of them are others than `before`."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and process.poll() is None:
            text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            found = [int(pid) for pid in text.split()]
            if len(found) == RANKS and not set(found) & set(before):
                return found
            time.sleep(0.02)
        raise StandsStillError(f"torchrun did not start {RANKS} ranks in {PATIENCE:g} s")

    def _moment(self, way: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait for it; False if the run ended before. Raises `StandsStillError`."""
        latest, start = self.folder.names()[:1], time.monotonic()
        if way == "after the start":
            end = start + self.chance.uniform(0, 1.5 * self.seconds)
            while time.monotonic() < end and self._step() < _step(latest) + MOST_STEPS:
                time.sleep(0.001)
            return process.poll() is None
        while process.poll() is None and time.monotonic() < start + PATIENCE:
            if way == "while saving" and list(self.folder.path.glob("step-*.partial")):
                time.sleep(self.chance.uniform(0, 0.01))
                return True
            if way == "after a step" and self.folder.names()[:1] != latest:
                self.seconds = time.monotonic() - start
                time.sleep(self.chance.uniform(0, 0.3))
                return True
            time.sleep(0.0005)
        if process.poll() is None:
            raise StandsStillError(f"no checkpoint in {PATIENCE:g} s, the latest is {latest}")
        return False

    def _step(self) -> int:
        return _step(self.folder.names()[:1])

    def _latest(self) -> str:
        """The checkpoint that a resume would take, read as one reads it."""
        saved, wrong = self.folder.latest()
        self.torn += wrong
        if saved is None:
            return "no checkpoint yet"
        try:
            read_index(saved.folder, saved.sizes)
        except ValueError as e:
            self.torn.append(str(e))
        return f"step {saved.step} is complete"


def run(kind: str, kills: int, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train once in `folder`, disturbed `kills` times: what came of it, losses by step with it."""
    target, log = f"{folder / 'job.py'}:job", folder / "run.log"
    checkpoints, begin = CheckpointFolder(folder / "runs"), time.monotonic()
    killer = Killer(kills, checkpoints, random.Random(seed), 10.0)
    with log.open("w") as out:
        training = launch(
            Target(target, settings=("pause=0.05",)),
            plan_of(target, kind),
            LaunchOptions(
                steps,
                SaveOptions(str(checkpoints.path), EVERY),
                max_restarts=2 * kills + 10,
                stall_timeout=STANDING,
                start_timeout=STANDING,
            ),
            stdout=out,
            run=killer,
        )
    said = log.read_text()
    return {
        "plan": kind,
        "seed": seed,
        "kills": sum(killer.done.values()),
        "kills_by_moment": dict(killer.done),
        "resumed": said.count("resumed after step"),
        "steps": steps,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "status": training.status,
        "stood_still": [line for line in said.splitlines() if _STOOD.search(line)],
        "torn_checkpoints": killer.torn,
        "passed_over": said.count("passed over:"),
        "left_aside": [path.name for path in checkpoints.path.glob("*.partial")],
        "last": checkpoints.names()[:1],
        "losses": _losses(training),
    }


def plan_of(target: str, kind: str) -> Plan:
    """A plan of the job, of one of `KINDS`."""
    given, machine = load_job(target), sw.Machine.preset(f"{RANKS}xcpu")
    graph = sw.capture(given.model(), (), dict(given.call()[1]))
    if kind != ASYNC:
        return sw.price(graph, machine, KINDS[kind])
    found = sw.search(graph, machine, stages=(RANKS,), allow_async=True)
    plans: list[Plan] = [*found, *found.baselines]
    return next(plan for plan in plans if plan.is_asynchronous)


def undisturbed(kind: str, steps: int, folder: Path) -> dict[int, float]:
    """Losses of as many steps, by step.

    It saves as often, because an asynchronous pipeline is drained before each checkpoint.
    """
    target = f"{folder / 'job.py'}:job"
    options = LaunchOptions(steps, SaveOptions(str(folder / "undisturbed"), EVERY))
    with (folder / "undisturbed.log").open("w") as out:
        return _losses(launch(Target(target), plan_of(target, kind), options, stdout=out))


def _step(names: Sequence[str]) -> int:
    """Of the checkpoint that is named first; 0 if there is none."""
    return int(names[0].rpartition("-")[2]) if names else 0


def _losses(training: Training) -> dict[int, float]:
    return {one.step: one.loss for one in training.records}


def totals(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all runs come to."""
    moments: Counter[str] = Counter()
    for one in runs:
        moments.update(one["kills_by_moment"])
    added = {name: sum(one[name] for one in runs) for name in ("kills", "resumed", "passed_over")}
    lists = ("stood_still", "torn_checkpoints", "left_aside")
    joined = {name: [text for one in runs for text in one[name]] for name in lists}
    same = all(one["same_curve"] for one in runs)
    steps = sum(one["steps"] for one in runs)
    return {"kills_by_moment": dict(moments), "same_curve": same, "steps": steps, **added, **joined}


def good(result: Mapping[str, Any], kills: int) -> bool:
    """Whether everything came out as it should."""
    whole = not (result["torn_checkpoints"] or result["left_aside"] or result["passed_over"])
    ended = all(one["status"] == 0 for one in result["runs"])
    return result["kills"] == kills and ended and result["same_curve"] and whole


def kept(file: Path, seed: int) -> list[dict[str, Any]]:
    """Runs that are there already, of the code that is checked out."""
    if not file.exists():
        return []
    result = json.loads(file.read_text())
    same = result["seed"] == seed and result["commit"] == record.commit()
    return [*result["runs"]] if same else []


def main() -> None:
    """Kill, compare, print the count and the outcome, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120.0, help="after which no run is begun")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--fresh", action="store_true", help="do again what the result has")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOO_LATE))  # and torchrun ends with us
    claim = "any kill, at any moment, leaves a complete checkpoint and the curve"
    runs = [] if options.fresh else kept(options.out, options.seed)
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), dict[str, dict[int, float]]()
        for number in range(len(runs), -(-options.kills // EACH)):
            if time.monotonic() > end:
                break
            (home := folder / str(number)).mkdir()
            (home / "job.py").write_text(JOB)
            kind = [*KINDS][number % len(KINDS)]
            if kind not in expected:
                expected[kind] = undisturbed(kind, STEPS_PER_KILL * EACH, home)
            kills = min(EACH, options.kills - number * EACH)
            one = run(kind, kills, STEPS_PER_KILL * kills, options.seed + number, home)
            found = one.pop("losses")
            steps = range(1, one["steps"] + 1)
            one["same_curve"] = found == {step: expected[kind][step] for step in steps}
            runs.append(one)
            record.write({"claim": claim, "runs": runs, **totals(runs)}, options.out, options.seed)
    result = {"runs": runs, **totals(runs)}
    outcome = "the undisturbed curve, nothing torn" if good(result, options.kills) else "FAILED"
    print(f"{result['kills']} kills {result['kills_by_moment']}: {outcome}")
    sys.exit(0 if good(result, options.kills) else 1)


if __name__ == "__main__":
    main()
