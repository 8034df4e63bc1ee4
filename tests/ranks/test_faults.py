"""Ranks that are killed, stopped, given other data, or compute what is no number."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.parameters.nan_origin import origin
from shardwright.train.checkpoint.folder import CheckpointFolder
from shardwright.train.coordination.consensus import Consensus, check_same_setup, digest
from shardwright.train.data.batch import JobError
from shardwright.train.launch import launch
from shardwright.train.launch_options import LaunchOptions, SaveOptions
from shardwright.train.targets.target_text import Target
from tests.harness.ranks import run_ranks
from tests.harness.script_ranks import forked

STOPPED = 30  # seconds within which all ranks of a run end after one has failed

JOB = """
import os, time, torch
from torch import nn
import shardwright as sw

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(self.drop(torch.relu(self.up(x)))).square().mean()

def data(pause, full):
    while True:
        time.sleep(pause)
        if os.path.exists(full) and os.environ["RANK"] == "1":
            os.remove(full)
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        yield {"x": torch.randn(8, 6)}

def job(pause=0.0, full=""):
    return sw.Job(Net, {"x": torch.zeros(8, 6)}, lambda p: torch.optim.AdamW(p, lr=0.01),
                  lambda: data(pause, full), 30)
"""
ROOT = Path(__file__).parents[2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return self.down(hidden.log() * 0 + hidden).square().mean()  # 0 · log(0) is NaN


def plan(module, batch, devices, name):
    frontier = sw.search(sw.capture(module, (), batch), sw.Machine.preset(f"{devices}xcpu"))
    return {p.name: p for p in frontier.baselines}[name]


def faults(text):
    """Every rank: what is said of NaN, of other data and of other software."""
    torch.manual_seed(0)
    module = sw.parallelize(Net(), sw.Plan.from_json(text))
    rank = torch.distributed.get_rank()
    batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(1))}
    said = [origin(module, batch, (0, 0))]
    again = module(**batch)
    assert again.isnan()  # it runs as before
    consensus = Consensus()
    consensus.check_batches(3, [batch])
    consensus.settle()
    assert consensus.may_go_on()
    consensus.check_batches(4, [{"x": torch.full((2,), float(rank))}])  # does not wait
    with pytest.raises(JobError) as data:
        consensus.settle()
    check_same_setup(sw.Plan.from_json(text), Net() if torch.manual_seed(1) else None)
    torch.manual_seed(rank)
    with pytest.raises(JobError) as weights:
        check_same_setup(sw.Plan.from_json(text), Net())
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError) as software:
        patch.setattr(torch, "__version__", f"2.{rank}")
        check_same_setup(sw.Plan.from_json(text), Net())
    assert consensus.may_go_on()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    stopped = [not consensus.may_go_on() for _ in range(3)][-1]
    return [*said, str(data.value), str(weights.value), str(software.value), stopped]


@pytest.mark.ranks
def test_ranks_say_what_is_wrong_and_which_of_them():
    text = plan_to_json(plan(Net(), {"x": torch.randn(8, 6)}, 2, "data parallel"))
    first, second = run_ranks(2, faults, text)
    assert first == second
    where, data, weights, software, stopped = first
    assert where.startswith("mul") and "the model itself" in where and "test_faults.py" in where
    assert data.startswith("the batches of step 4 are not the same on rank 1 as on rank 0")
    assert weights.startswith("rank 1 has weights")
    assert software.startswith("rank 1 has torch 2.1, rank 0 has 2.0; give all hosts the same")
    assert stopped


def test_digests_tell_batches_apart():
    batches = [{"x": torch.zeros(3)}, {"y": torch.zeros(3)}, {"x": torch.ones(3)}, {"x": 1}, [2], 2]
    batches += [{"x": torch.zeros(3, dtype=torch.int64)}, {"x": torch.zeros(0)}, torch.zeros(3, 1)]
    assert len({digest(batch) for batch in batches}) == len(batches)
    large = torch.zeros(10**6)
    changed = large.clone()
    changed[::2] = 1
    assert digest(large) != digest(changed)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "small.py").write_text(JOB)
    sys.path.insert(0, str(folder))
    try:
        import small

        text = plan(small.Net(), {"x": torch.zeros(8, 6)}, 2, "fully sharded")
    finally:
        sys.path.remove(str(folder))
    return str(folder / "small.py") + ":job", text


def losses(training):
    return {record.step: record.loss for record in training.records}


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_and_terminated_runs_end_with_the_undisturbed_curve(job, tmp_path):
    """Kill -9 of a rank that saves: all start again, and so after one that has no memory left.

    The other rank stops in time each time.
    SIGTERM: a checkpoint, an end, then a resume.
    A hundred kills at random moments: benchmarks/kills.
    """
    text, plan = job
    target = Target(text)
    with (tmp_path / "0.log").open("w") as first_log:
        undisturbed = losses(launch(target, plan, LaunchOptions(24), stdout=first_log, run=forked))
    assert sorted(undisturbed) == list(range(1, 25))
    saving = SaveOptions(str(tmp_path / "runs"), every=2)
    folder, full = CheckpointFolder(tmp_path / "runs"), tmp_path / "full"

    def disturbed(command, env, stdout):
        process = subprocess.Popen(command, env=env, stdout=stdout, stderr=stdout)
        _until(lambda: folder.names()[:1] >= ["step-00000006"], process)
        ranks, staging = _ranks_of(process.pid), list(folder.path.glob("*.partial"))
        _until(
            lambda: set(folder.path.glob("step-*.partial")) - set(staging), process, pause=0.0005
        )
        os.kill(ranks[1], signal.SIGKILL)
        _until(lambda: _are_gone(ranks), process, STOPPED)
        _until(lambda: folder.names()[:1] >= ["step-00000010"], process)
        ranks = _ranks_of(process.pid)
        full.touch()
        _until(lambda: not full.exists(), process)
        _until(lambda: _are_gone(ranks), process, STOPPED)
        _until(lambda: folder.names()[:1] >= ["step-00000014"], process)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=60)

    log = tmp_path / "1.log"
    with log.open("w") as out:
        slow = replace(target, settings=("pause=0.1", f"full={full}"))
        first = launch(slow, plan, LaunchOptions(24, saving, 6), stdout=out, run=disturbed)
    said = log.read_text()
    assert "resumed after step" in said and "stopped by SIGTERM after step" in said, said
    starts, cause = said.split("resumed after step"), "shardwright: rank 1 has no memory left"
    (before,) = (start.split(cause)[0] for start in starts[:-1] if cause in start)
    assert "Traceback" not in before, said
    stopped = int(said.split("stopped by SIGTERM after step ")[1].split()[0])
    assert folder.names()[0] == f"step-{stopped:08}"
    assert not list((tmp_path / "runs").glob("*.partial"))
    with (tmp_path / "2.log").open("w") as last:
        second = launch(target, plan, LaunchOptions(24, saving), stdout=last, run=forked)
    assert min(losses(second)) == stopped + 1
    found = losses(first) | losses(second)
    assert found == undisturbed


def _until(is_so, process, seconds=240, pause=0.05):
    end = time.monotonic() + seconds
    while not is_so():
        assert process.poll() is None and time.monotonic() < end, "the run ended or is stuck"
        time.sleep(pause)


def _are_gone(ranks):
    return not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def _ranks_of(launcher):
    """Processes of the ranks, by the launcher's number."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children]
