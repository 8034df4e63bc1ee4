"""One curve, whatever the plan and the number of ranks: saved, loaded elsewhere, gone on with."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import start
from tests.harness.ranks import run_ranks, whole

WORDS, WIDTH, BATCH, LENGTH = 13, 12, 6, 5
LEG, STEPS = 3, 12


class Net(nn.Module):
    """Tied embeddings, dropout, batch norm's running buffers, a frozen and a 0-d parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 24, bias=False)  # norm takes it away
        self.norm = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.embed(ids)
        y = self.norm(self.up(self.fixed(x)).flatten(0, 1)).view(*x.shape[:2], 24)
        x = x + self.down(self.drop(torch.relu(y))) * self.scale
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def data():
    """Five batches, drawn from torch's own generator: their place and its state both matter."""
    for _ in range(5):
        ids = torch.randint(WORDS, (BATCH, LENGTH))
        yield {"ids": ids, "labels": ids.roll(1, 1)}


def optimizer(parameters):
    trained = [p for p in parameters if p.requires_grad]
    vectors = [p for p in trained if p.dim() < 2]
    tables = [p for p in trained if p.dim() >= 2]
    return torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2
    )


JOB = Job(
    model=lambda: Net().double(),
    batch=lambda: next(data()),
    optimizer=optimizer,
    data=data,
    steps=STEPS,
    schedule=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [4, 7, 7], gamma=0.5),
    seed=3,
)
PLANS = {2: "fully sharded", 4: "data x tensor parallel", 1: "fastest", 3: "data parallel"}


def plan_for(devices, name=None):
    seed_all(0)
    frontier = sw.search(sw.capture(Net().double(), (), JOB.batch()), _machine(devices), "adamw")
    named = {plan.name: plan for plan in frontier.baselines} | {"fastest": frontier[0]}
    return named[name or PLANS[devices]]


def _machine(devices):
    return sw.Machine.preset(f"{devices}xcpu")


def begin(text):
    """A run of the job under a plan, before its first step."""
    seed_all(JOB.seed)
    return start(sw.parallelize(JOB.model(), sw.Plan.from_json(text), seed=JOB.seed), JOB)


def advance(run, steps):
    losses = []
    for _ in range(steps):
        losses.append(run.module.train_step(run.optimizer, next(run.batches)).item())
        run.schedule.step()
        run.step += 1
    return losses


def leg(text, folder):
    """Resume if there is something, train a leg and save; losses and where it began."""
    run = begin(text)
    checkpoints = Checkpoints(folder, sw.Plan.from_json(text), keep=2)
    saved, wrong = checkpoints.resume(run)
    assert not wrong
    first = run.step
    assert first == (saved.step if saved else 0)
    losses = advance(run, LEG)
    checkpoints.save(run)
    return first, losses, {n: whole(p) for n, p in run.module.named_parameters()}


@pytest.fixture(scope="module")
def undisturbed():
    run = begin(plan_to_json(plan_for(1)))
    losses = advance(run, STEPS)
    return losses, {n: whole(p) for n, p in run.module.named_parameters()}


@pytest.mark.ranks
def test_one_curve_over_two_four_one_and_three_ranks(undisturbed, tmp_path):
    curve, weights = undisturbed
    found = []
    for devices in (2, 4, 1, 3):
        text = plan_to_json(plan_for(devices))
        results = run_ranks(devices, leg, text, str(tmp_path))
        assert all(r[:2] == results[0][:2] for r in results)
        assert results[0][0] == len(found)
        found += results[0][1]
    assert found == pytest.approx(curve, rel=1e-10, abs=0)
    for name, value in results[0][2].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-11, msg=name)
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000009", "step-00000012"]
    assert sw.Plan.load(tmp_path / "step-00000012/plan.json").devices == 3
