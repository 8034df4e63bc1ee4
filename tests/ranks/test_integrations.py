"""The examples of other trainers: under a plan that shards, the losses of the plain model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright.plan_io.files import save_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.mark.hf
def test_hugging_faces_trainer_trains_under_a_plan(example, tmp_path):
    from hf_trainer import BATCH, data, default_data_collator, gpt2, train

    batch = default_data_collator(data()[:BATCH])
    losses = run("hf_trainer.py", sharded(gpt2(), (), batch, tmp_path))
    model = gpt2()

    class Loss(torch.nn.Module):  # what a planned module returns
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return self.model(**inputs).loss

    torch.testing.assert_close(losses, torch.tensor(train(Loss())), rtol=0, atol=2e-4)


def test_lightning_trains_under_a_plan(example, tmp_path):
    from lightning_mlp import BATCH, STEPS, Classifier, data

    torch.manual_seed(0)
    model = Classifier()
    losses = run("lightning_mlp.py", sharded(model, data()[:BATCH], {}, tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*data()[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, torch.tensor(expected), rtol=0, atol=2e-6)


def test_accelerate_trains_under_a_plan(example, tmp_path):
    """Two batches make an update, and gradients are clipped, by the Accelerator on both sides."""
    from accelerate import Accelerator
    from accelerate_mlp import ACCUMULATED, BATCH, Classifier, data, train

    torch.manual_seed(0)
    model = Classifier()
    losses = run("accelerate_mlp.py", sharded(model, data()[:BATCH], {}, tmp_path))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    expected = torch.tensor(train(model, accelerator))
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-6)


def sharded(model, args, kwargs, folder):
    """A file with the fully sharded plan on two ranks."""
    graph = sw.capture(model, args, kwargs)
    plans = sw.search(graph, sw.Machine.preset("2xcpu")).baselines
    (plan,) = [plan for plan in plans if plan.name == "fully sharded"]
    assert any("S" in str(parameter.layout) for parameter in plan.parameters)
    save_plan(plan, folder / "plan.json")
    return folder / "plan.json"


def run(name, plan):
    """The losses that an example prints on two ranks."""
    root = str(EXAMPLES.parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(EXAMPLES / name), str(plan)],
        capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses: ")]
    return torch.tensor([float(loss) for loss in line.split()[1:]])
