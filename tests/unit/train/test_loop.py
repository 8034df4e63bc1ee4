import io
import json

import torch
from rich.console import Console
from torch import nn

from shardwright.train.job import Job
from shardwright.train.loop import StepRecord, count_units, reporter, start, train


class Serial(nn.Module):
    """What the loop asks of a parallel module, on one device."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def train_step(self, optimizer, batch):
        optimizer.zero_grad()
        loss = self.layer(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"x": torch.randn(8, 3, generator=generator), "name": "kept as it is"}


def records(steps=5):
    job = Job(Serial, next(batches()), lambda ps: torch.optim.SGD(ps, lr=0.1), batches, 99)
    torch.manual_seed(0)
    found = []
    train(start(Serial(), job), steps, torch.device("cpu"), found.append)
    return found


def test_every_step_is_reported_and_the_loss_falls():
    found = records(20)
    assert [r.step for r in found] == list(range(1, 21))
    assert found[-1].loss < found[0].loss
    assert all(r.seconds > 0 and r.bytes > 0 for r in found)
    assert {(r.units, r.unit) for r in found} == {(8, "samples")}


def test_the_same_job_gives_the_same_losses():
    assert [r.loss for r in records()] == [r.loss for r in records()]


def test_units_are_tokens_of_integer_tables_and_samples_of_all_else():
    assert count_units({"ids": torch.zeros(2, 5, dtype=torch.long)}) == (10, "tokens")
    assert count_units((torch.zeros(2, 5),)) == (2, "samples")
    assert count_units({"n": 3}) == (1, "samples")


def test_a_step_is_one_line():
    record = StepRecord(12, 1.23456, 0.5, 1000, "tokens", 3 * 2**29)
    assert str(record) == "step    12  loss 1.2346  2,000 tokens/s  memory 1.50 GiB"


def test_without_a_terminal_there_are_lines_and_no_bar():
    page, losses = io.StringIO(), io.StringIO()
    with reporter(2, losses, Console(file=page)) as report:
        for step in (1, 2):
            report(StepRecord(step, 0.5, 0.1, 10, "tokens", 2**20))
    assert [line.split()[:2] for line in page.getvalue().splitlines()] == [
        ["step", "1"],
        ["step", "2"],
    ]
    assert [json.loads(line)["step"] for line in losses.getvalue().splitlines()] == [1, 2]


def test_on_a_terminal_there_is_a_bar_too():
    page = io.StringIO()
    terminal = Console(file=page, force_terminal=True, width=80)
    with reporter(2, io.StringIO(), terminal) as report:
        report(StepRecord(1, 0.5, 0.1, 10, "tokens", 2**20))
    assert "training" in page.getvalue()
    assert "1/2" in page.getvalue()
