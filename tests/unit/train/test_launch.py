import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from shardwright.plan_io.files import load_plan
from shardwright.train.launch import Training, environment, launch, run_process
from shardwright.train.launch_options import LaunchOptions, SaveOptions
from shardwright.train.loop import StepRecord
from shardwright.train.routing import RoutingRecord
from shardwright.train.targets.target_text import Target
from shardwright.train.traced_step import trace_file
from tests.harness import plans

TARGET = Target("a.py:job")


def record(step, seconds=0.5):
    return StepRecord(step, 1 / step, seconds, 10, "tokens", 2**20)


class FakeTorchrun:
    """Keeps what it was asked to run, writes the losses that rank 0 would, and ends."""

    def __init__(self, status=0, steps=3, traces=()):
        self.status, self.steps, self.traces = status, steps, traces

    def __call__(self, command, env, stdout):
        self.command, self.env, self.stdout = list(command), dict(env), stdout
        self.plan = load_plan(self.option("--plan"))
        lines = [json.dumps(asdict(record(i + 1))) for i in range(self.steps)]
        if lines:
            Path(self.option("--losses")).write_text("\n".join(lines))
        for rank in self.traces:
            trace_file(self.option("--trace"), rank).write_text(f"step of rank {rank}")
        return self.status

    def option(self, name):
        return self.command[self.command.index(name) + 1]


def test_torchrun_gets_one_rank_per_device_and_the_plan():
    torchrun, plan = FakeTorchrun(), plans.simple(mesh="dp=2")
    training = launch(TARGET, plan, LaunchOptions(steps=7), run=torchrun)
    assert torchrun.command[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert "--nproc-per-node=2" in torchrun.command
    assert torchrun.option("--target") == "a.py:job"
    assert torchrun.option("--steps") == "7"
    assert torchrun.plan == plan
    launch(TARGET, plan, run=(shorter := FakeTorchrun()))
    assert "--steps" not in shorter.command
    assert "--batch" not in torchrun.command
    assert training == Training(0, (record(1), record(2), record(3)))


def test_what_was_measured_of_routing_comes_back():
    found = RoutingRecord(1.25, 1.5)

    def run(command, env, stdout):
        losses = Path(command[command.index("--losses") + 1])
        losses.write_text("\n".join([json.dumps(asdict(record(1))), found.line()]))
        return 0

    assert launch(TARGET, plans.simple(), run=run) == Training(0, (record(1),), (), found)


def test_the_sizes_of_a_config_are_passed_on():
    torchrun = FakeTorchrun()
    launch(Target("config.json", 8, 16), plans.simple(), run=torchrun)
    assert (torchrun.option("--batch"), torchrun.option("--seq")) == ("8", "16")


def test_settings_are_passed_on():
    torchrun = FakeTorchrun()
    target = Target("a.py:job", settings=("width=8", "depth=2"))
    launch(target, plans.simple(), run=torchrun)
    at = [i for i, part in enumerate(torchrun.command) if part == "--set"]
    assert [torchrun.command[i + 1] for i in at] == ["width=8", "depth=2"]


def test_ranks_are_told_of_checkpoints_and_restarted():
    torchrun = FakeTorchrun()
    saving = SaveOptions("runs/a", every=7, keep=2)
    options = LaunchOptions(saving=saving, max_restarts=3)
    launch(TARGET, plans.simple(), options, run=torchrun)
    assert "--max-restarts=3" in torchrun.command
    assert torchrun.option("--checkpoint") == str(Path("runs/a").absolute())
    assert (torchrun.option("--every"), torchrun.option("--keep")) == ("7", "2")


def test_steps_that_ranks_recorded_come_back():
    torchrun = FakeTorchrun(traces=(0, 2))
    training = launch(TARGET, plans.simple(mesh="dp=4"), LaunchOptions(traced=True), run=torchrun)
    assert training.traces == {0: "step of rank 0", 2: "step of rank 2"}
    launch(TARGET, plans.simple(), run=(untraced := FakeTorchrun()))
    assert "--trace" not in untraced.command


def test_a_step_that_was_done_again_counts_once():
    def restarted(command, env, stdout):
        losses = Path(command[command.index("--losses") + 1])
        lines = [asdict(record(step)) for step in (1, 2, 3)] + [asdict(record(2, 9.0))]
        losses.write_text("\n".join(map(json.dumps, lines)))
        return 0

    training = launch(TARGET, plans.simple(), run=restarted)
    assert training.records == (record(1), record(2, 9.0), record(3))


def test_lines_that_were_cut_short_are_left_out():
    """Of a rank that was killed while it wrote; the whole run ended in an error of JSON."""

    def restarted(command, env, stdout):
        losses = Path(command[command.index("--losses") + 1])
        lines = [json.dumps(asdict(record(step))) for step in (1, 2, 3)]
        losses.write_text("\n".join([lines[0], lines[1][:9], "", "3", *lines[1:]]))
        return 0

    training = launch(TARGET, plans.simple(), run=restarted)
    assert training.records == (record(1), record(2), record(3))


def test_nothing_is_left_behind():
    torchrun = FakeTorchrun()
    launch(TARGET, plans.simple(), run=torchrun)
    assert not Path(torchrun.option("--plan")).parent.exists()


def test_a_failure_keeps_its_status_and_the_steps_before_it():
    training = launch(TARGET, plans.simple(), run=FakeTorchrun(status=3, steps=2))
    assert training.status == 3
    assert len(training.records) == 2
    assert launch(TARGET, plans.simple(), run=FakeTorchrun(1, 0)).records == ()


def test_the_step_time_is_a_median_without_the_first_steps():
    slow_start = (record(1, 9.0), record(2, 8.0), record(3, 7.0))
    steady = tuple(record(i, i / 10) for i in range(4, 9))
    assert Training(0, slow_start + steady).step_seconds == 0.6
    assert Training(0, (record(1, 2.0),)).step_seconds == 2.0
    assert Training(0, ()).step_seconds is None


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert environment(1)["OMP_NUM_THREADS"] == str(cores)
    assert environment(10 * cores)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(2)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    "code, status",
    [("", 0), ("import sys; sys.exit(5)", 5), ("import os; os.kill(os.getpid(), 15)", 128 + 15)],
)
def test_a_process_hands_on_its_status(code, status):
    assert run_process([sys.executable, "-c", code], os.environ, None) == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_process_and_ends_both(number, tmp_path):
    """In a child, so that the test's own handlers and group stay out of it."""
    child = "import time; print('up', flush=True); time.sleep(60)"
    parent = (
        "import os, sys\n"
        "from shardwright.train.launch import run_process\n"
        f"sys.exit(run_process([sys.executable, '-c', {child!r}], os.environ, None))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[3],
        # Those of a job in the background ignore interrupts, and their children with them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == b"up\n"
    start = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=20) != 0
    assert time.monotonic() - start < 10
