"""Evaluation is what the plain module in evaluation mode gives, under every plan, on every rank.

Batch norm takes its running statistics, dropout and whole paths are not dropped, and what
`self.training` decides is decided so; training goes on as if nobody had looked.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.export import export_safetensors, load_safetensors
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import EvaluationRecord, evaluate, start, train
from tests.harness.ranks import run_ranks

CPU = torch.device("cpu")
STEPS = 3


class Block(nn.Module):
    """Dropped as a whole, sample by sample, while it trains."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm, self.drop = nn.BatchNorm2d(width), nn.Dropout(0.2)

    def forward(self, x):
        y = torch.relu(self.norm(self.conv(self.drop(x))))
        if self.training:
            y = y * (torch.rand(len(y), 1, 1, 1, dtype=y.dtype, device=y.device) < 0.7) / 0.7
        return x + y


class Net(nn.Module):
    """A second head, and smoother labels, while it trains."""

    def __init__(self, width=8, kinds=6):
        super().__init__()
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.block = Block(width)
        self.norm = nn.BatchNorm1d(width)
        self.head, self.staging = nn.Linear(width, kinds), nn.Linear(width, kinds)

    def forward(self, image, label):
        x = self.block(self.stem(image))
        x = self.norm(x.mean((2, 3)))
        smoothing = 0.1 if self.training else 0.0
        loss = nn.functional.cross_entropy(self.head(x), label, label_smoothing=smoothing)
        if self.training:
            loss = loss + 0.3 * nn.functional.cross_entropy(self.staging(x), label)
        return loss


class Attention(nn.Module):
    """Attention that drops weights while it trains is taken apart then, and one operator else."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(width, 11)

    def forward(self, ids):
        x = self.embed(ids)
        parts = self.qkv(self.drop(x)).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        dropped = 0.3 if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=dropped)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def words():
    return {"ids": torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(5))}


def attention():
    torch.manual_seed(0)
    return Attention().double()


class Images(Dataset):
    """Batches of eight, and four that are left."""

    def __init__(self, first, length=12):
        self.first, self.length = first, length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(self.first + i)
        image = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
        return {"image": image, "label": torch.randint(6, (), generator=generator)}


def model():
    torch.manual_seed(0)
    return Net().double()


def batch(size=8):
    image = torch.zeros(size, 2, 5, 5, dtype=torch.float64)
    return {"image": image, "label": torch.zeros(size, dtype=torch.int64)}


JOB = Job(
    model, batch(), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), Images(0, 16), STEPS,
    evaluation=Images(100), evaluate_every=2, seed=1,
)  # fmt: skip


def run(text, folder):
    """Losses, evaluations, and what the plain module says of the weights at the end."""
    seed_all(JOB.seed)
    net, plan = JOB.model(), sw.Plan.from_json(text)
    module = ShapeVariants(net, plan, JOB.other_calls(), seed=JOB.seed, evaluated=True)
    assert net.training and all(m.training for m in net.modules())
    found = []
    train(start(module, JOB), replace(JOB, steps=STEPS), CPU, found.append)
    buffers = {name: b.clone() for name, b in module.lasting_buffers().items()}
    # A stage of a pipeline may have no batch norm.
    assert plan.stages > 1 or any(name.endswith("running_var") for name in buffers)
    again = evaluate(module, JOB, CPU)
    for name, value in module.lasting_buffers().items():
        assert torch.equal(value, buffers[name]), name
    export_safetensors(module, net, f"{folder}/weights.safetensors")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    plain = Net().double()
    load_safetensors(plain, f"{folder}/weights.safetensors")
    evaluated = [r.evaluation for r in found if isinstance(r, EvaluationRecord)]
    losses = [r.loss for r in found if not isinstance(r, EvaluationRecord)]
    return losses, evaluated, again, serial(plain.eval())


def serial(plain):
    """Mean loss of the evaluation's samples in plain PyTorch, batch by batch."""
    total = 0.0
    with torch.no_grad():
        for given in JOB.evaluation_batches():
            total += plain(**given).item() * len(given["label"])
    return total / 12


def attended(texts):
    """The loss in evaluation mode under each plan."""
    losses = []
    for text in texts:
        module = ShapeVariants(attention(), sw.Plan.from_json(text), [], evaluated=True)
        with torch.no_grad():
            losses.append(module.train(False).loss(words()).item())
    return losses


def texts(devices, *names, of=model, example=batch):
    graph = sw.capture(of(), (), example())
    machine = sw.Machine.preset(f"{devices}xcpu")
    known = {plan.name: plan for plan in sw.search(graph, machine, "sgd").baselines}
    if "pipeline" in names:
        staged = sw.search(graph, machine, "sgd", stages=(2,))
        known["pipeline"] = next(plan for plan in staged if plan.stages == 2)
    return [plan_to_json(known[name]) for name in names]


def runs(plans, folder, others=()):
    return [run(text, folder) for text in plans], attended(others)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    plan = sw.search(sw.capture(model(), (), batch()), sw.Machine.preset("1xcpu"), "sgd")[0]
    return run(plan_to_json(plan), tmp_path_factory.mktemp("one"))


def check(found, expected):
    losses, evaluated, again, plain = found
    assert losses == pytest.approx(expected[0], rel=1e-10)
    assert len(evaluated) == 2 and evaluated[-1] == again
    assert evaluated == pytest.approx(expected[1], rel=1e-10)
    assert again == pytest.approx(plain, rel=1e-10)


def test_one_device_evaluates_as_the_plain_module(one_device):
    check(one_device, one_device)


@pytest.mark.ranks
def test_two_ranks_evaluate_as_one_device(one_device, tmp_path):
    plans = texts(2, "fully sharded", "tensor parallel", "pipeline")
    others = texts(2, "tensor parallel", "pipeline", of=attention, example=words)
    first, second = run_ranks(2, runs, plans, str(tmp_path), others)
    assert first == second
    for found in first[0]:
        check(found, one_device)
    with torch.no_grad():
        expected = attention().eval()(**words()).item()
    assert first[1] == pytest.approx([expected] * 2, rel=1e-12)


@pytest.mark.ranks
def test_four_ranks_evaluate_as_one_device(one_device, tmp_path):
    (first, *others) = run_ranks(4, runs, texts(4, "data x tensor parallel"), str(tmp_path))
    assert all(other == first for other in others)
    check(first[0][0], one_device)


def test_what_is_not_made_ready_to_be_evaluated_is_captured_then():
    plan = sw.search(sw.capture(model(), (), batch()), sw.Machine.preset("1xcpu"), "sgd")[0]
    module = ShapeVariants(model(), plan, [])
    found = evaluate(module, replace(JOB, evaluation=[batch()]), CPU)
    with torch.no_grad():
        assert found == pytest.approx(model().eval()(**batch()).item(), rel=1e-12)
