"""Random `kill -9` of random ranks: the run always goes on from a complete checkpoint.

    python -m benchmarks.kills.run --kills 100

One job trains on two ranks, saves every other step in the background, and torchrun starts
the ranks again whenever one dies. A third of the kills come while a checkpoint
is being written, a third at a random moment after a step, the others at a random moment
after the ranks were started. After each kill the latest checkpoint is read. At the end
the losses of all steps are compared with those of a run that nobody disturbed. It takes
about a quarter of an hour, and not more than `--minutes`: then fewer have been killed,
which counts as failed.
"""

from __future__ import annotations

import argparse
import os
import random
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
from shardwright.train.folder import CheckpointFolder
from shardwright.train.launch import Saving, Training, launch
from shardwright.train.reading import read_index
from shardwright.train.target import load_job

SEED = 0
RANKS, EVERY = 2, 2
PATIENCE = 300.0  # seconds for a restart on a busy machine
MOST_STEPS = 8  # that a run goes on after a start before a rank is killed
STEPS_PER_KILL = 12  # so that all are killed before the end
TOO_LATE = 124  # the status of a run that was ended for its time
WAYS = "while saving", "after a step", "after the start"
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


@dataclass
class Killer:
    """Stands between `launch` and the processes: kills ranks until `kills` have died."""

    kills: int
    folder: CheckpointFolder
    chance: random.Random
    seconds: float  # that a start takes about, as far as known
    end: float  # of the clock that only goes forward: no longer
    done: Counter[str] = field(default_factory=Counter)
    torn: list[str] = field(default_factory=list)  # of checkpoints that could not be read

    def __call__(self, command: Sequence[str], env: Mapping[str, str], out: TextIO | None) -> int:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            before: list[int] = []
            while sum(self.done.values()) < self.kills and time.monotonic() < self.end:
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
            return process.wait(max(PATIENCE, self.end - time.monotonic()))
        except subprocess.TimeoutExpired:
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
        raise RuntimeError(f"torchrun did not start {RANKS} ranks again")

    def _moment(self, way: str, process: subprocess.Popen[bytes]) -> bool:
        """Wait for it; False if the run ended before."""
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


def run(kills: int, steps: int, seed: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Train twice, disturbed for so many `seconds` at most and not, and compare."""
    (folder / "job.py").write_text(JOB)
    target, log = f"{folder / 'job.py'}:job", folder / "run.log"
    given = load_job(target)
    graph = sw.capture(given.model(), (), dict(given.call()[1]))
    named = {p.name: p for p in sw.search(graph, sw.Machine.preset(f"{RANKS}xcpu")).baselines}
    plan = named["fully sharded"]
    with log.open("w") as out:
        undisturbed = _losses(launch(target, plan, steps, stdout=out))
        checkpoints = CheckpointFolder(folder / "runs")
        begin = time.monotonic()
        killer = Killer(kills, checkpoints, random.Random(seed), 10.0, begin + seconds)
        disturbed = launch(
            target,
            plan,
            steps,
            settings=("pause=0.05",),
            saving=Saving(str(checkpoints.path), EVERY),
            max_restarts=2 * kills + 10,
            stdout=out,
            run=killer,
        )
    found, said = _losses(disturbed), log.read_text()
    return {
        "kills": sum(killer.done.values()),
        "kills_by_moment": dict(killer.done),
        "resumed": said.count("resumed after step"),
        "steps": steps,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "status": disturbed.status,
        "same_curve": found == undisturbed and sorted(found) == list(range(1, steps + 1)),
        "torn_checkpoints": killer.torn,
        "passed_over": said.count("passed over:"),
        "left_aside": [path.name for path in checkpoints.path.glob("*.partial")],
        "last": checkpoints.names()[:1],
    }


def _step(names: Sequence[str]) -> int:
    """Of the checkpoint that is named first; 0 if there is none."""
    return int(names[0].rpartition("-")[2]) if names else 0


def _losses(training: Training) -> dict[int, float]:
    return {one.step: one.loss for one in training.records}


def good(result: Mapping[str, Any], kills: int) -> bool:
    """Whether everything came out as it should."""
    whole = not (result["torn_checkpoints"] or result["left_aside"] or result["passed_over"])
    return result["kills"] == kills and result["status"] == 0 and result["same_curve"] and whole


def main() -> None:
    """Kill, compare, print the count and the outcome, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, help=f"by default {STEPS_PER_KILL} for each kill")
    parser.add_argument("--minutes", type=float, default=120.0, help="at most")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOO_LATE))  # and torchrun ends with us
    with tempfile.TemporaryDirectory() as folder:
        steps = options.steps or STEPS_PER_KILL * options.kills
        result = run(options.kills, steps, options.seed, Path(folder), 60 * options.minutes)
    record.write(
        {"claim": "any kill, at any moment, leaves a complete checkpoint and the curve", **result},
        options.out,
        options.seed,
    )
    outcome = "the undisturbed curve, nothing torn" if good(result, options.kills) else "FAILED"
    print(f"{result['kills']} kills {result['kills_by_moment']}: {outcome}")
    sys.exit(0 if good(result, options.kills) else 1)


if __name__ == "__main__":
    main()
