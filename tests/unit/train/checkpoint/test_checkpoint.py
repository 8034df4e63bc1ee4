"""Saving and resuming on one device. Other numbers of ranks: tests/ranks/test_checkpoints.py."""

import errno
import json
import resource
import shutil
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.train.checkpoint import async_save
from shardwright.train.checkpoint.checkpoint import Checkpoints, _on_rank_0
from shardwright.train.checkpoint.digests import DigestWriter
from shardwright.train.checkpoint.lock import LOCK
from shardwright.train.checkpoint.reading import CheckpointError
from shardwright.train.checkpoint.saving import PeriodicSaver
from shardwright.train.job import Job
from shardwright.train.loop import start, train
from tests.harness import plans

PLAN = plans.simple()
CPU = torch.device("cpu")


class Serial(nn.Module):
    """What training asks of a parallel module, on one device; `late` is not used at first."""

    def __init__(self, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(width, 4)
        self.norm = nn.BatchNorm1d(4)
        self.late = nn.Parameter(torch.ones(4, 5))
        self.state = (7, 0)

    def lasting_buffers(self):
        return dict(self.named_buffers())

    def random_state(self):
        return self.state

    def set_random_state(self, state):
        self.state = state

    known = (((), ()),)

    def random_tensor(self):
        return torch.tensor(self.state)

    def forward_backward(self, batch, on_loss=None, scaler=None):
        self.state = (self.state[0], self.state[1] + 1)
        y = self.norm(self.layer(batch["x"]))
        if self.state[1] > 6:
            y = y @ self.late
        loss = (y - 1).square().mean() * self.state[1]
        if on_loss is not None:
            on_loss(loss)
        loss.backward()
        return loss.detach()


def data():
    while True:
        yield {"x": torch.randn(8, 3)}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def job(optimizer=adamw, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5)):
    return Job(Serial, {"x": torch.zeros(8, 3)}, optimizer, data, 99, schedule)


def saving(folder, every=5, keep=9, failed=None):
    return PeriodicSaver(Checkpoints(folder, PLAN, keep), every, failed or pytest.fail)


def losses(run, steps, saves=None):
    found = []
    train(
        run,
        replace(job(), steps=steps),
        CPU,
        lambda record: found.append((record.step, record.loss)),
        saves,
    )
    return found


def names(folder):
    """What is in a folder of checkpoints, beside the lock."""
    return sorted(p.name for p in folder.iterdir() if p.name != LOCK)


OPTIMIZERS = {
    "adamw": adamw,
    "adamw with a tensor as rate": lambda ps: torch.optim.AdamW(
        ps, lr=torch.tensor(0.1), capturable=False, foreach=False
    ),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adafactor": torch.optim.Adafactor,  # keeps rows and columns of what it averages
    "adagrad": torch.optim.Adagrad,  # keeps state before the first step
    "rprop": torch.optim.Rprop,
    "groups": lambda ps: torch.optim.AdamW([{"params": [p], "lr": 0.1 / p.dim()} for p in ps]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_does_what_an_undisturbed_one_does(name, tmp_path):
    torch.manual_seed(1)
    undisturbed = losses(start(Serial(), job(OPTIMIZERS[name])), 12)
    torch.manual_seed(1)
    losses(start(Serial(), job(OPTIMIZERS[name])), 5, saving(tmp_path))
    torch.manual_seed(2)
    run = start(Serial(), job(OPTIMIZERS[name]))
    with torch.no_grad():
        for p in run.module.parameters():
            p.zero_()
    saves = saving(tmp_path)
    saved, wrong = saves.checkpoints.resume(run)
    assert (saved.step, wrong) == (5, [])
    assert losses(run, 12, saves) == undisturbed[5:]


def test_it_saves_every_so_often_and_at_the_end(tmp_path):
    losses(start(Serial(), job()), 12, saving(tmp_path))
    assert names(tmp_path) == [
        "step-00000005",
        "step-00000010",
        "step-00000012",
    ]


def resumed(module, job, folder):
    with pytest.raises(CheckpointError, match=r"cannot go on from .*step-00000005: ") as caught:
        Checkpoints(folder, PLAN).resume(start(module, job))
    return str(caught.value).partition("step-00000005: ")[2]


class More(Serial):
    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.ones(2))


class Whole(Serial):
    """A parameter that an earlier version stored as (4, 5)."""

    def __init__(self):
        super().__init__()
        self.late = nn.Parameter(torch.ones(20))


def halves(parameters):
    parameters = list(parameters)
    return torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])


def test_what_does_not_fit_the_job_is_a_mistake(tmp_path):
    losses(start(Serial(), job()), 5, saving(tmp_path))
    assert "it has layer.weight of shape (4, 3)" in resumed(Serial(2), job(), tmp_path)
    assert "(4, 5), the model's is (20,); earlier versions stored" in resumed(
        Whole(), job(), tmp_path
    )
    assert "it has no more, the model has" in resumed(More(), job(), tmp_path)
    assert "has 2 parameter groups, the checkpoint has 1" in resumed(
        Serial(), job(halves), tmp_path
    )
    text = resumed(Serial(), job(schedule=None), tmp_path)
    assert text == "it has one learning-rate schedule, unlike the job"


def test_groups_of_other_members_are_a_mistake(tmp_path):
    def other(parameters):
        parameters = list(parameters)
        return torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])

    losses(start(Serial(), job(halves)), 5, saving(tmp_path))
    text = resumed(Serial(), job(other), tmp_path)
    assert text.startswith("layer.bias is in group 0 of the optimizer, in the checkpoint it is no")


def test_a_damaged_latest_checkpoint_is_passed_over(tmp_path):
    losses(start(Serial(), job()), 10, saving(tmp_path))
    (data_file,) = (tmp_path / "step-00000010").glob("*.distcp")
    data_file.write_bytes(data_file.read_bytes()[:-1])
    run = start(Serial(), job())
    saved, (wrong,) = Checkpoints(tmp_path, PLAN).resume(run)
    assert run.step == saved.step == 5
    assert data_file.name in wrong


def test_a_full_disk_stops_no_training(tmp_path, monkeypatch):
    """The checkpoint of step 5 fails, training goes on, that of step 10 is there."""
    told = []

    class Full(DigestWriter):
        def write_data(self, *args):
            (self.path / "half").write_bytes(b"x")
            raise OSError(errno.ENOSPC, "No space left on device")

    class Once(Full):
        def write_data(self, *args):
            monkeypatch.setattr(async_save, "DigestWriter", DigestWriter)
            super().write_data(*args)

    monkeypatch.setattr(async_save, "DigestWriter", Once)
    losses(start(Serial(), job()), 10, saving(tmp_path, failed=lambda e: told.append(str(e))))
    assert told == [
        f"the checkpoint of step 5 could not be written to {tmp_path}: No space left on device"
    ]
    assert names(tmp_path) == ["step-00000010"]

    monkeypatch.setattr(async_save, "DigestWriter", Full)
    with pytest.raises(CheckpointError, match="step 7 could not be written"):  # the last one
        losses(start(Serial(), job()), 7, saving(tmp_path / "b", failed=lambda e: None))
    assert names(tmp_path / "b") == []


@pytest.mark.parametrize("other", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_a_checkpoint_counts_if_all_ranks_have_written(other, tmp_path, monkeypatch):
    run, checkpoints = start(Serial(), job()), Checkpoints(tmp_path, PLAN)
    losses(run, 1)
    checkpoints.begin(run)
    assert checkpoints._begun[1].exception() is None  # waits until this rank has written
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda every, mine: every.__setitem__(slice(2), [mine, other])
    )
    if other is None:
        checkpoints.settle()
        assert checkpoints.last == 1
        return
    with pytest.raises(CheckpointError, match=r"step 1 could not be written .*No space left"):
        checkpoints.settle()


def test_what_the_system_does_not_write_is_told_and_gone(tmp_path):
    """A real write that fails: files may not grow beyond 1,000 bytes."""
    run = start(Serial(), job())
    losses(run, 2)
    checkpoints = Checkpoints(tmp_path, PLAN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*too large"):
            checkpoints.save(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []
    checkpoints.save(run)
    assert checkpoints.folder.names() == ["step-00000002"]


def test_steps_go_on_while_what_was_is_written(tmp_path, monkeypatch):
    """The writer of step 5 waits until step 8; what it writes is still what was at step 5."""
    undisturbed, go = losses(start(Serial(), job()), 9), threading.Event()

    class Waits(DigestWriter):
        def write_data(self, *args):
            assert go.wait(60)
            return super().write_data(*args)

    monkeypatch.setattr(async_save, "DigestWriter", Waits)
    seen = {}

    def report(record):
        seen[record.step] = names(tmp_path)
        if record.step == 8:
            go.set()

    train(start(Serial(), job()), replace(job(), steps=9), CPU, report, saving(tmp_path))
    assert seen[8] == ["step-00000005.partial"]
    assert names(tmp_path) == ["step-00000005", "step-00000009"]
    shutil.rmtree(tmp_path / "step-00000009")
    run = start(Serial(), job())
    with torch.no_grad():
        for p in run.module.parameters():
            p.zero_()
    assert Checkpoints(tmp_path, PLAN).resume(run)[0].step == 5
    assert losses(run, 9) == undisturbed[5:]


def test_an_optimizer_of_other_parameters_is_a_mistake(tmp_path):
    run = start(Serial(), job(lambda ps: torch.optim.SGD([nn.Parameter(torch.ones(3))])))
    with pytest.raises(CheckpointError, match=r"a parameter of shape \(3,\) that is not of"):
        Checkpoints(tmp_path, PLAN).save(run)


def test_what_a_checkpoint_cannot_hold_is_a_mistake(tmp_path):
    class Odd(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return {**super().state_dict(), "odd": object()}

    run = start(Serial(), job(schedule=lambda o: Odd(o, 4)))
    with pytest.raises(ValueError, match=r"cannot hold a builtins\.object"):
        Checkpoints(tmp_path, PLAN).save(run)
    assert names(tmp_path) == []


def test_the_record_is_plain_json(tmp_path):
    losses(start(Serial(), job()), 5, saving(tmp_path))
    record = json.loads((tmp_path / "step-00000005/state.json").read_text())
    assert record["step"] == 5 and record["module"] == [7, 5]
    assert record["optimizer"]["members"][0][:2] == ["late", "layer.weight"]


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("no number")])
def test_what_rank_0_does_or_meets_is_what_every_rank_has(tmp_path, error):
    def fail():
        raise error

    for grouped in (False, True):
        if grouped:
            store = f"file://{tmp_path}/store"
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            assert _on_rank_0(lambda: 7) == 7
            with pytest.raises(type(error), match=str(error)):
                _on_rank_0(fail)
        finally:
            if grouped:
                dist.destroy_process_group()
