"""Starts the ranks of a run on this host with torchrun and collects their records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from shardwright.ir.plan import Plan
from shardwright.plan_io.files import save_plan
from shardwright.runtime.ranks import threads_of
from shardwright.train.launch_options import DEFAULTS, LaunchOptions
from shardwright.train.loop import EvaluationRecord, StepRecord
from shardwright.train.routing import RoutingRecord
from shardwright.train.targets.target_text import Target
from shardwright.train.traced_step import trace_file

_GRACE_SECONDS = 40.0  # torchrun waits 30 seconds for its ranks before it kills them
_FORWARDED = (signal.SIGINT, signal.SIGTERM)

T = TypeVar("T")
Runner = Callable[[Sequence[str], Mapping[str, str], TextIO | None], int]


@dataclass(frozen=True, slots=True)
class Training:
    """The result of a run: torchrun's exit status and the records of rank 0."""

    status: int
    records: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...] = ()
    routing: RoutingRecord | None = None
    traces: Mapping[int, str] = field(
        default_factory=dict
    )  # traces of a step, by rank, if requested

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, or None without steps.

        The first three steps do not count, or the first half if there are fewer than six.
        """
        seconds = sorted(r.seconds for r in self.records[min(3, len(self.records) // 2) :])
        return seconds[len(seconds) // 2] if seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors on rank 0 in a step; None if no step was measured."""
        return max((r.tensor_bytes for r in self.records), default=0) or None


def run_process(command: Sequence[str], env: Mapping[str, str], stdout: TextIO | None) -> int:
    """Run `command` to its end and return its exit status, as a shell reports it.

    SIGINT and SIGTERM are forwarded, in the main thread. The command gets a session of its own, so
    that Ctrl-C reaches it once. All its processes are killed if it does not end in time.
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
    target: Target,
    plan: Plan,
    options: LaunchOptions = DEFAULTS,
    *,
    stdout: TextIO | None = None,
    run: Runner = run_process,
) -> Training:
    """Train TARGET under `plan`, one rank per device, on this host.

    Args:
        target: the job.
        plan: the plan, which the ranks read from a temporary file.
        options: options of the run.
        stdout: the file for the log of the ranks; None: that of this process.
        run: runs a command and returns its exit status.
    """
    with tempfile.TemporaryDirectory(prefix="shardwright-") as folder:
        plan_file, losses = Path(folder, "plan.json"), Path(folder, "losses.jsonl")
        save_plan(plan, plan_file)
        command = torchrun(plan.devices, options.max_restarts)
        command += [*target.arguments(), "--plan", str(plan_file), "--losses", str(losses)]
        command += [*options.arguments(), *(["--trace", folder] if options.traced else [])]
        status = run(command, environment(plan.devices), stdout)
        records = tuple(_records(losses.read_text())) if losses.exists() else ()
        files = {rank: trace_file(folder, rank) for rank in range(plan.devices)}
        traces = {rank: file.read_text() for rank, file in files.items() if file.exists()}
    # Restarted ranks repeat some steps; the last record of a step counts.
    steps_done, evaluated, routing = {}, {}, None
    for found in records:
        if "routing" in found:
            routing = RoutingRecord(**found["routing"])
        elif "evaluation" in found:
            evaluated[found["step"]] = EvaluationRecord(**found)
        else:
            steps_done[found["step"]] = StepRecord(**found)
    return Training(status, _in_order(steps_done), _in_order(evaluated), routing, traces)


def _records(text: str) -> Iterator[dict[str, Any]]:
    """The records in lines of JSON, without a line that a killed rank or a full disk cut short."""
    for line in text.splitlines():
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _in_order(by_step: Mapping[int, T]) -> tuple[T, ...]:
    return tuple(by_step[step] for step in sorted(by_step))


def torchrun(ranks: int, max_restarts: int = 0) -> list[str]:
    """The command that starts the worker on `ranks` local processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    return [*torchrun, "-m", "shardwright.train.worker"]


def environment(ranks: int) -> dict[str, str]:
    """The environment of the ranks.

    Unless this process has other values, the ranks share the cores (OMP_NUM_THREADS), and warnings
    of transformers and of torch's profiler are off.
    """
    defaults = {
        "OMP_NUM_THREADS": str(threads_of(ranks)),
        "TRANSFORMERS_VERBOSITY": "error",
        "KINETO_LOG_LEVEL": "5",
    }
    return {**defaults, **os.environ}
