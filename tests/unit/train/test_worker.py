"""One rank of one, so that no other process is needed."""

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.plan_io.files import save_plan
from shardwright.report.timelines.profiled import profiled
from shardwright.runtime.deferred.sources import give_memory, sources_of
from shardwright.train import worker
from shardwright.train.coordination.rendezvous import is_first_to_fail, join
from shardwright.train.coordination.watchdog import STALLED
from tests.harness import plans

ROOT = Path(__file__).parents[3]

JOB = """
import torch
from torch import nn
from shardwright.train.job import Job

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x).square().mean()

def job():
    batch = {"x": torch.ones(8, 3)}
    return Job(Model, batch, lambda ps: torch.optim.SGD(ps, lr=0.1), [batch], 3)
"""


class Serial(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    known = (((), ()),)

    def lasting_buffers(self):
        return {}

    def random_state(self):
        return 0, 0

    def set_timeout(self, timeout):
        assert timeout > timedelta(seconds=600)

    def origin_of_nonfinite(self, batch, state):
        return "its layer"

    def random_tensor(self):
        return torch.zeros(2, dtype=torch.int64)

    def forward_backward(self, batch, on_loss=None, scaler=None):
        loss = self.model(**batch)
        on_loss(loss)
        loss.backward()
        return loss.detach()


@pytest.fixture
def rank_of_one(monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))


def test_a_rank_trains_reports_and_leaves_no_group(rank_of_one, monkeypatch, tmp_path, capsys):
    asked = {}

    def parallel(model, plan, others, *, seed, device, compiled, evaluated):
        assert others == [] and compiled and not evaluated
        asked.update(plan=plan, seed=seed, group=dist.is_initialized())
        give_memory(model, sources_of(model))
        return Serial(model.to(device))

    monkeypatch.setattr(worker, "ShapeVariants", parallel)
    target, plan, losses = (tmp_path / name for name in ("worker_job.py", "p.json", "l.jsonl"))
    target.write_text(JOB)
    save_plan(plans.simple(mesh="dp=1"), plan)
    options = ["--target", f"{target}:job", "--plan", plan, "--steps", 4, "--losses", losses]
    options += ["--compile", "--tensorboard", tmp_path / "board", "--trace", tmp_path]
    losses.write_text('{"step": 1, "lo')  # of a rank that was killed
    worker.main([str(option) for option in options])
    options[options.index(losses)] = "/dev/full"  # a full disk
    worker.main([str(option) for option in options])

    assert asked == {"plan": plans.simple(mesh="dp=1"), "seed": 0, "group": True}
    assert not dist.is_initialized()
    records = [json.loads(line) for line in losses.read_text().splitlines()[1:]]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] < records[0]["loss"]
    assert len(list((tmp_path / "board").iterdir())) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 8
    warning = (
        "warning: cannot write the records of steps: No space left on device; training goes on"
    )
    assert printed.err.count("warning: cannot write") == 1 and warning in printed.err
    step = profiled((tmp_path / "step-0.json").read_text(), "measured")
    names = [name for _, name, *_ in step.events]
    assert names[0] == "ProfilerStep#3" and "Optimizer.step#SGD.step" in names
    assert step.seconds > 0


def test_what_a_rank_cannot_begin_with_is_one_line(monkeypatch, tmp_path):
    """Of rank 0; the others only end. Control characters of names do not reach the terminal."""
    options = ["--target", f"{tmp_path}/\x1b[2J.py:job", "--steps", "1", "--losses", "l"]
    for rank, said in (("0", "shardwright: there is no file"), ("1", "1")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            worker.main([*options, "--plan", str(tmp_path / "plan.json")])
        assert str(ended.value).startswith(said) and "\x1b" not in str(ended.value)


def test_a_rank_that_cannot_join_the_others_says_so_and_ends(tmp_path):
    """Something else listens where the store should be, and never answers."""
    target, plan = tmp_path / "worker_job.py", tmp_path / "p.json"
    target.write_text(JOB)
    save_plan(plans.simple(mesh="dp=2"), plan)
    with socket.socket() as other:
        other.bind(("localhost", 0))
        other.listen()
        port = other.getsockname()[1]
        environment = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        command = [sys.executable, "-m", "shardwright.train.worker", "--target", f"{target}:job"]
        done = subprocess.run(
            [*command, "--plan", plan, "--steps", "1", "--losses", plan, "--start-timeout", "3"],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == STALLED
    assert done.stderr.startswith("shardwright: rank 1 ")  # where it is: busy machines are slow
    assert "for 3 s, and the store that all ranks share does not answer" in done.stderr


def test_a_start_reads_nothing_of_the_one_before_it(monkeypatch):
    """In one store, which outlives the ranks: what a dead rank wrote is not what the next finds."""
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": 0, "WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 1}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": kept.port}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "mine"}
    found = []
    for start in ("0", "1"):
        for name, value in {**environment, "TORCHELASTIC_RESTART_COUNT": start}.items():
            monkeypatch.setenv(name, str(value))
        join(torch.device("cpu"), timedelta(seconds=60))
        store = dist.group.WORLD.get_group_store()
        found.append(store.check(["said"]))
        store.set("said", "by this one")
        dist.destroy_process_group()
    assert found == [False, False]


def test_the_first_rank_with_a_mistake_says_it(monkeypatch):
    """Only rank 0 did, and a mistake of another rank alone ended the run without a line."""
    kept = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": kept.port, "GROUP_WORLD_SIZE": 1}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "mine"}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    assert [is_first_to_fail(rank) for rank in (3, 0, 3, 1)] == [True, False, True, False]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert is_first_to_fail(1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert [is_first_to_fail(rank) for rank in (1, 0)] == [False, True]


def test_a_rank_without_memory_says_what_was_predicted(rank_of_one, monkeypatch, tmp_path):
    def full(*_given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(worker, "_train", full)
    monkeypatch.setattr(worker, "end_within", lambda _seconds: None)
    target, plan = tmp_path / "worker_job.py", tmp_path / "p.json"
    target.write_text(JOB)
    save_plan(plans.simple(mesh="dp=1"), plan)
    options = ["--target", f"{target}:job", "--plan", plan, "--losses", tmp_path / "l.jsonl"]
    with pytest.raises(SystemExit, match=r"shardwright: rank 0 has no memory left: .* predicts"):
        worker.main([str(option) for option in options])
