"""Starts the ranks of a run with torchrun and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO, TypeVar

from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.train.loop import EvaluationRecord, StepRecord
from shardwright.train.routing import RoutingRecord
from shardwright.train.traced_step import trace_file

_GRACE_SECONDS = 40.0  # torchrun gives its ranks 30 before it kills them
_FORWARDED = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")
Runner = Callable[[Sequence[str], Mapping[str, str], TextIO | None], int]


@dataclass(frozen=True, slots=True)
class Training:
    """How a run ended: torchrun's exit status, and what rank 0 reported."""

    status: int
    records: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...] = ()
    routing: RoutingRecord | None = None
    traces: Mapping[int, str] = field(default_factory=dict)  # of a step, by rank, if asked for

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step, the first ones left out; None before there is any."""
        seconds = sorted(r.seconds for r in self.records[min(3, len(self.records) // 2) :])
        return seconds[len(seconds) // 2] if seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors in a step, where one was counted."""
        return max((r.tensor_bytes for r in self.records), default=0) or None


@dataclass(frozen=True, slots=True)
class Saving:
    """Where ranks keep checkpoints, every how many steps, how many, and whether steps `wait`."""

    folder: str
    every: int = 100
    keep: int = 3
    wait: bool = False

    def options(self) -> list[str]:
        """What the worker is told."""
        numbers = ["--every", str(self.every), "--keep", str(self.keep)]
        waits = ["--wait-for-saves"] if self.wait else []
        return ["--checkpoint", str(Path(self.folder).absolute()), *numbers, *waits]


def run_process(command: Sequence[str], env: Mapping[str, str], stdout: TextIO | None) -> int:
    """Run `command` to its end and return its exit status, as a shell would give it.

    SIGINT and SIGTERM go on to it. It leads a session of its own, so that a
    Ctrl-C reaches it once, and all of it can be killed if it does not end.
    """
    process = subprocess.Popen(command, env=env, stdout=stdout, start_new_session=True)

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    def forward(number: int, _: object) -> None:
        process.send_signal(number)
        timer = threading.Timer(_GRACE_SECONDS, kill)
        timer.daemon = True
        timer.start()

    here = threading.current_thread() is threading.main_thread()
    previous = {n: signal.signal(n, forward) for n in _FORWARDED} if here else {}
    try:
        status = process.wait()
    finally:
        kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def launch(
    target: str,
    plan: Plan,
    steps: int,
    sizes: tuple[int | None, int | None] = (None, None),
    *,
    settings: Sequence[str] = (),
    saving: Saving | None = None,
    max_restarts: int = 0,
    stall_timeout: float | None = None,
    start_timeout: float | None = None,
    export: str | None = None,
    options: Sequence[str] = (),
    traced: bool = False,
    stdout: TextIO | None = None,
    run: Runner = run_process,
) -> Training:
    """Train TARGET under `plan`, one rank per device, on this host.

    `sizes` are batch and sequence of a `config.json`, `settings` those of
    `load_job`. With `saving` the ranks go on from the latest checkpoint, and
    torchrun starts them again up to `max_restarts` times if one dies, none has done a step for
    `stall_timeout` seconds, or a part of their start took `start_timeout`. At the end they write
    the weights to `export`, a `.safetensors` file or a folder. `options` are further ones of the
    worker. Where it is `traced`, one rank of each stage records a step. Their log goes to
    `stdout`, by default ours. `run` starts the processes; tests replace it.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        plan_file, losses = Path(folder, "plan.json"), Path(folder, "losses.jsonl")
        save_plan(plan, plan_file)
        command = torchrun(plan.devices, max_restarts)
        command += ["--target", target, "--plan", str(plan_file)]
        command += ["--steps", str(steps), "--losses", str(losses)]
        for option, size in zip(("--batch", "--seq"), sizes, strict=True):
            command += [option, str(size)] if size is not None else []
        command += [part for text in settings for part in ("--set", text)]
        command += saving.options() if saving is not None else []
        command += ["--stall-timeout", str(stall_timeout)] if stall_timeout is not None else []
        command += ["--start-timeout", str(start_timeout)] if start_timeout is not None else []
        command += options
        command += ["--trace", folder] if traced else []
        command += ["--export", str(Path(export).absolute())] if export is not None else []
        status = run(command, environment(plan.devices), stdout)
        lines = losses.read_text().splitlines() if losses.exists() else []
        files = {rank: trace_file(folder, rank) for rank in range(plan.devices)}
        traces = {rank: file.read_text() for rank, file in files.items() if file.exists()}
    # Ranks that were started again did some steps again: the later report counts.
    steps_done, evaluated, routing = {}, {}, None
    for found in map(json.loads, lines):
        if "routing" in found:
            routing = RoutingRecord(**found["routing"])
        elif "evaluation" in found:
            evaluated[found["step"]] = EvaluationRecord(**found)
        else:
            steps_done[found["step"]] = StepRecord(**found)
    return Training(status, _in_order(steps_done), _in_order(evaluated), routing, traces)


def _in_order(by_step: Mapping[int, T]) -> tuple[T, ...]:
    return tuple(by_step[step] for step in sorted(by_step))


def torchrun(ranks: int, max_restarts: int = 0) -> list[str]:
    """The command that starts the worker on `ranks` local processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return [*torchrun, "-m", "shardwright.train.worker"]


def environment(ranks: int) -> dict[str, str]:
    """Our environment, where the ranks share the cores unless OMP_NUM_THREADS is set.

    They do not repeat the warnings that building the model here has shown already.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // ranks)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TRANSFORMERS_VERBOSITY": "error",
        "KINETO_LOG_LEVEL": "5",
    }
    return {**defaults, **os.environ}
