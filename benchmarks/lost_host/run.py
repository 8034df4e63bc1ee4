"""Two hosts train, one is lost, the other goes on, it comes back, both end the job: one curve.

    python -m benchmarks.lost_host.run

The hosts are network namespaces (`benchmarks/hosts`), each runs `torchrun --nnodes 1:2` with the
same folder of plans, for one device and for two. The link of one is unplugged and its processes are
killed, so that the other hears nothing: it is told by `--stall-timeout`. Then it is plugged in and
its torchrun started again. Losses are compared with those of one device that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from benchmarks import record
from benchmarks.hosts import Cluster, HostError, HostsUnavailableError, Link, hosts
from benchmarks.hosts.network import DEVICE, address
from shardwright.plan_io.files import load_plan
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.checkpoint import PLAN
from shardwright.train.checkpoint.folder import CheckpointFolder
from shardwright.train.data.randomness import seed_all
from shardwright.train.loop import StepRecord, start, train
from shardwright.train.targets.target import load_job

SEED, BOUND, EVERY = 0, 1e-9, 2
KEPT, LOST = 0, 1  # hosts
TIMEOUT = 300.0  # seconds for each part of the story, on a busy machine
PORT = 29400
JOB = """
import os
import time

import torch
from torch import nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 64), nn.Dropout(0.2), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()


class Data:
    '''Knows its place. A rank that is alone is slow, so that the other host can come back.'''

    def __init__(self):
        self.taken = 0

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep({"1": 2.0, "2": 0.05}.get(os.environ.get("WORLD_SIZE"), 0.0))
        self.taken += 1
        generator = torch.Generator().manual_seed(self.taken)
        return {"x": torch.randn(8, 16, generator=generator, dtype=torch.float64)}

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def job():
    return sw.Job(lambda: Net().double(), {"x": torch.zeros(8, 16, dtype=torch.float64)},
                  lambda p: torch.optim.AdamW(p, lr=0.01), Data, 10_000, clip_norm=1.0)
"""


@dataclass
class Story:
    """What happens to a job in `folder`; `told` says when, in seconds and steps."""

    cluster: Cluster
    folder: Path
    steps: int
    stall_seconds: float
    told: list[dict[str, Any]] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """From the first start to the end of the job; raises `HostError` where it gets stuck."""
        with ExitStack() as held:
            running = {host: self._start(host, held) for host in (KEPT, LOST)}
            self._until("two hosts train", running, lambda: self._latest() == 2)
            self.cluster.plug(LOST, into=False)
            _end(running.pop(LOST))
            self._tell("one is lost")
            self._until("the other trains alone", running, lambda: self._latest() == 1)
            self.cluster.plug(LOST, into=True)
            running[LOST] = self._start(LOST, held)
            self._tell("it comes back")
            self._until("two hosts train again", running, lambda: self._latest() == 2)
            done = lambda: all(process.poll() == 0 for process in running.values())  # noqa: E731
            self._until("the job is done", running, done)

    def _start(self, host: int, held: ExitStack) -> subprocess.Popen[bytes]:
        out = held.enter_context((self.folder / f"host-{host}.log").open("ab"))
        environment = {
            "GLOO_SOCKET_IFNAME": DEVICE,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        process = self.cluster.start(host, self._command(host), out, environment)
        held.callback(_end, process)
        return process

    def _command(self, host: int) -> Sequence[str]:
        rendezvous = f"is_host={int(host == KEPT)},last_call_timeout=3"
        return [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9",
            "--rdzv-backend", "c10d", "--rdzv-id", "lost", "--rdzv-conf", rendezvous,
            "--rdzv-endpoint", f"{address(KEPT)}:{PORT}", "--local-addr", address(host),
            "-m", "shardwright.train.worker",
            "--target", f"{self.folder / 'job.py'}:job", "--plan", str(self.folder / "plans"),
            "--steps", str(self.steps), "--losses", str(self.folder / "losses.jsonl"),
            "--checkpoint", str(self.folder / "runs"), "--every", str(EVERY),
            "--stall-timeout", str(self.stall_seconds),
        ]  # fmt: skip

    def _latest(self) -> int:
        """For how many devices the plan of the latest checkpoint is; 0 if there is none."""
        names = CheckpointFolder(self.folder / "runs").names()
        file = self.folder / "runs" / names[0] / PLAN if names else None
        return load_plan(file).devices if file is not None and file.exists() else 0

    def _until(
        self, what: str, running: dict[int, subprocess.Popen[bytes]], holds: Callable[[], bool]
    ) -> None:
        end = time.monotonic() + TIMEOUT
        while not holds():
            for host, process in running.items():
                if process.poll() not in (None, 0):
                    raise HostError(f"host {host} ended with {process.poll()}: {self._said(host)}")
            if time.monotonic() > end:
                raise HostError(f"waited {TIMEOUT:g} s until {what}: {self._said(KEPT)}")
            time.sleep(0.05)
        self._tell(what)

    def _said(self, host: int) -> str:
        return (self.folder / f"host-{host}.log").read_text(errors="replace")[-4000:]

    def _tell(self, what: str) -> None:
        names = CheckpointFolder(self.folder / "runs").names()
        step = int(names[0].rpartition("-")[2]) if names else 0
        seconds = round(time.monotonic() - self.begin, 1)
        self.told.append({"what": what, "seconds": seconds, "checkpoint": step})
        print(f"{seconds:6.1f} s, checkpoint of step {step}: {what}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # and with it all that it has started
    process.wait()


def prepared(folder: Path, steps: int) -> list[float]:
    """The job's file and its plans, written to `folder`; the losses of one device."""
    (folder / "job.py").write_text(JOB)
    (folder / "plans").mkdir()
    job = load_job(f"{folder / 'job.py'}:job")
    graph = sw.capture(job.model(), (), dict(job.call()[1]))
    for devices, name in ((1, "data parallel"), (2, "fully sharded")):
        frontier = sw.search(graph, sw.Machine.preset(f"{devices}xcpu"), "adamw")
        named = {plan.name: plan for plan in frontier.baselines} | {"data parallel": frontier[0]}
        named[name].save(folder / "plans" / f"{devices}.json")
    seed_all(job.seed)
    module = ShapeVariants(job.model(), load_plan(folder / "plans/1.json"), [], seed=job.seed)
    found: list[float] = []

    def keep(one: Any) -> None:
        if isinstance(one, StepRecord):
            found.append(one.loss)

    seed_all(job.seed)
    train(start(module, job), replace(job, steps=steps), torch.device("cpu"), keep)
    return found


def run(cluster: Cluster, folder: Path, steps: int, stall_seconds: float) -> dict[str, Any]:
    """The story, and how far the losses of all its steps are from those of one device."""
    expected = prepared(folder, steps)
    story = Story(cluster, folder, steps, stall_seconds)
    story.run()
    lines = map(json.loads, (folder / "losses.jsonl").read_text().splitlines())
    found = {one["step"]: one["loss"] for one in lines}
    steps_done = sorted(found) == list(range(1, steps + 1))
    apart = max(
        abs(found[i + 1] - loss) / loss for i, loss in enumerate(expected) if i + 1 in found
    )
    return {
        "steps": steps,
        "stall_seconds": stall_seconds,
        "told": story.told,
        "every_step_once": steps_done,
        "largest_difference": apart,
    }


def good(result: dict[str, Any]) -> bool:
    """Whether all steps were done, with the losses of one device."""
    return bool(result["every_step_once"] and result["largest_difference"] <= BOUND)


def main() -> None:
    """Tell the story, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gbit-per-s", type=float, default=1.0)
    parser.add_argument("--stall-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args()
    link = Link(options.gbit_per_s * 1e9)
    try:
        with tempfile.TemporaryDirectory() as folder, hosts(2, link) as cluster:
            result = run(cluster, Path(folder), options.steps, options.stall_seconds)
    except HostsUnavailableError as e:
        sys.exit(f"lost_host: {e}")
    claim = "a lost host ends no job, and its return is used; the losses are those of one device"
    record.write({"claim": claim, "bound": BOUND, "link": str(link), **result}, options.out, SEED)
    outcome = "the undisturbed curve" if good(result) else "FAILED"
    print(f"{options.steps} steps, worst {result['largest_difference']:.1e}: {outcome}")
    sys.exit(0 if good(result) else 1)


if __name__ == "__main__":
    main()
