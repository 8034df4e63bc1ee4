import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from shardwright.train.data.batch import JobError
from shardwright.train.job import Job
from shardwright.train.loop import StepRecord, count_units, reporter, start, train
from shardwright.train.step import NonFiniteLossError, Stepper, weights


class Serial(nn.Module):
    """What the loop asks of a parallel module, on one device."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    known = (((), ()),)

    def lasting_buffers(self):
        return {}

    def random_state(self):
        return 0, 0

    def origin_of_nonfinite(self, batch, state):
        return "its layer"

    def loss(self, batch):
        return self.layer(batch["x"]).square().mean()

    def random_tensor(self):
        return torch.zeros(2, dtype=torch.int64)

    def forward_backward(self, batch, on_loss=None, scaler=None):
        loss = self.loss(batch)
        on_loss(loss)
        loss.backward()
        return loss.detach()


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"x": torch.randn(8, 3, generator=generator), "name": "kept as it is"}


def records(steps=5):
    job = Job(Serial, next(batches()), lambda ps: torch.optim.SGD(ps, lr=0.1), batches, 99)
    torch.manual_seed(0)
    found = []
    train(start(Serial(), job), replace(job, steps=steps), torch.device("cpu"), found.append)
    return found


def test_the_second_step_counts_the_memory_of_tensors():
    counted = [record.tensor_bytes for record in records(3)]
    assert counted[0] == counted[2] == 0
    # The batch of 8 x 3, its squares and gradients: next to nothing, and not nothing.
    assert 4 * 8 * 3 < counted[1] < 4096


def test_every_step_is_reported_and_the_loss_falls():
    found = records(20)
    assert [r.step for r in found] == list(range(1, 21))
    assert found[-1].loss < found[0].loss
    assert all(r.seconds > 0 and r.bytes > 0 for r in found)
    assert {(r.units, r.unit) for r in found} == {(8, "samples")}


def test_samples_of_the_global_batch_are_reported_where_a_rank_reads_its_own():
    """They were those of rank 0, so that samples a second were too few under data parallelism."""
    job = Job(Serial, next(batches()), lambda ps: torch.optim.SGD(ps, lr=0.1), batches, 2)
    run, found = start(Serial(), job), []
    run.reads_own = True
    run.batches = iter([{"x": torch.randn(2, 3), "name": ""}] * 2)
    train(run, job, torch.device("cpu"), found.append)
    assert {(r.units, r.unit) for r in found} == {(8, "samples")}


def test_steps_whose_norms_are_read_later_are_reported_in_order_before_an_evaluation():
    """As on a GPU: the result of a step comes with the next one, or when the state is read."""
    evaluated = job(evaluation=[{"x": torch.ones(4, 3)}], evaluate_every=2, steps=3)
    run, found = start(Serial(), evaluated), []
    stepper = Stepper.of(run.module, 1.0)
    stepper.lag = 1
    train(run, evaluated, torch.device("cpu"), found.append, steps_of=stepper)
    assert [(type(r).__name__[:4], r.step) for r in found] == [
        ("Step", 1), ("Step", 2), ("Eval", 2), ("Step", 3), ("Eval", 3),
    ]  # fmt: skip
    steps = [record for record in found if isinstance(record, StepRecord)]
    assert [bool(record.tensor_bytes) for record in steps] == [False, True, False]
    assert all(record.gradient_norm > 0 and record.units == 8 for record in steps)


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


def job(**changes):
    given = (Serial, next(batches()), lambda ps: torch.optim.SGD(ps, lr=0.1), batches, 99)
    return replace(Job(*given), **changes)


def test_evaluation_is_a_mean_over_samples_every_so_often_and_at_the_end():
    torch.manual_seed(0)
    module, found = Serial(), []
    data = [{"x": torch.ones(4, 3)}, {"x": torch.zeros(2, 3)}]
    evaluated = job(evaluation=data, evaluate_every=2)
    train(start(module, evaluated), replace(evaluated, steps=3), torch.device("cpu"), found.append)
    assert [(type(r).__name__[:4], r.step) for r in found] == [
        ("Step", 1), ("Step", 2), ("Eval", 2), ("Step", 3), ("Eval", 3),
    ]  # fmt: skip
    with torch.no_grad():
        expected = (4 * module.loss(data[0]) + 2 * module.loss(data[1])) / 6
    assert found[-1].evaluation == pytest.approx(expected.item())
    assert module.training
    assert str(found[-1]).startswith("step     3  evaluation loss ")


def test_a_loss_that_is_no_number_stops_before_the_weights_change():
    module, poisoned = Serial(), [{"x": torch.full((2, 3), torch.inf)}]
    before = module.layer.weight.detach().clone()
    with pytest.raises(
        NonFiniteLossError,
        match="the loss of step 1 is nan; first to make NaN or infinity is its layer",
    ):
        train(
            start(module, job(data=poisoned)), replace(job(), steps=1), torch.device("cpu"), print
        )
    assert torch.equal(before, module.layer.weight)


@pytest.mark.parametrize(
    "labels, counted, message",
    [
        ([[1, -100], [1, 2]], None, "different numbers of labels that are -100, .* Job.tokens"),
        ([[1], [1]], lambda b: 0, r"Job.tokens counts \[0.0, 0.0\] for the batches of a step"),
        ([[1], [1]], lambda b: -1, "some must count"),
    ],
)
def test_batches_that_count_in_unknown_ways_are_refused(labels, counted, message):
    given = [{"labels": torch.tensor(row)} for row in labels]
    with pytest.raises(JobError, match=message):
        weights(given, counted)


def test_batches_count_alike_or_by_their_tokens():
    given = [{"labels": torch.tensor([1, -100])}, {"labels": torch.tensor([1, 2])}]
    assert weights(given, lambda b: (b["labels"] >= 0).sum()) == [1, 2]
    assert weights(given[:1] * 2, None) == [1, 1]
    assert weights(given[:1], None) == [1]
