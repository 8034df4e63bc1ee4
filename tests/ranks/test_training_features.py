"""Clipping, accumulation, groups, frozen and tied weights, other shapes: right under every plan.

The reference is plain PyTorch on one device, written out below.
"""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.parameters.clipping import Clipping
from shardwright.runtime.plan_transfer import shapes_of
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.checkpoint.checkpoint import Checkpoints
from shardwright.train.checkpoint.export import export_safetensors, load_safetensors
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import evaluate, read_own_samples, start, train
from tests.harness.ranks import run_ranks, whole

WORDS, WIDTH, BATCH, LENGTH, IGNORED = 13, 12, 6, 4, -100
CPU = torch.device("cpu")


class Net(nn.Module):
    """A tied embedding, a frozen layer with a low-rank one beside it, a number as a parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.fixed = nn.Linear(WIDTH, 24).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 24, bias=False)
        self.down = nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def logits(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.fixed(x) + self.b(self.a(x)))) * self.scale
        return self.head(x)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.logits(ids).flatten(0, 1), labels.flatten())


def batch(seed, rows=BATCH, length=LENGTH, ignored=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (rows, length), generator=generator)
    labels = ids.roll(1, 1)
    labels.view(-1)[:ignored] = IGNORED
    return {"ids": ids, "labels": labels}


class Samples(Dataset):
    """Two batches of six samples, by default and four that are left. Each draws when it is read."""

    def __init__(self, length=16):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read.append(i)
        drawn = int(torch.randint(WORDS, ()))
        sample = batch(i, rows=1)
        sample["ids"][0, 0] = drawn
        return {key: value[0] for key, value in sample.items()}


def groups(parameters):
    trained = [p for p in parameters if p.requires_grad]
    tables, rest = ([p for p in trained if (p.dim() >= 2) is yes] for yes in (True, False))
    return torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.3}, {"params": rest, "lr": 0.03}], lr=0.01
    )


def tokens(given):
    return (given["labels"] != IGNORED).sum()


def model():
    torch.manual_seed(0)
    return Net().double()


PLAIN = Job(
    model, batch(0), groups, [batch(1), batch(2), batch(3)], 4, seed=1,
    schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
)  # fmt: skip
UNEQUAL = [batch(i, ignored=n) for i, n in enumerate((0, 7, 24, 20, 3, 1))]
RAGGED = [batch(1), batch(2, rows=5), batch(3, length=3), batch(4, rows=1, length=2)]
JOBS = {
    "clipped hard": replace(PLAIN, clip_norm=0.5),
    "clipped never": replace(PLAIN, clip_norm=1e6),
    "accumulated over tokens": replace(
        PLAIN, accumulate=3, tokens=tokens, data=UNEQUAL, clip_norm=0.7
    ),
    "accumulated": replace(PLAIN, accumulate=2),
    "a dataset with a rest": replace(PLAIN, data=Samples(), steps=6),
    "padded": replace(PLAIN, data=RAGGED, padding={"ids": 0, "labels": IGNORED}),
    "buckets": replace(
        PLAIN,
        data=RAGGED,
        shapes=[batch(0, length=3), batch(0, rows=5)],
        padding={"ids": 0, "labels": IGNORED},
    ),
}


def serial(job):
    """Losses, norms, and weights at the end, by plain PyTorch."""
    seed_all(job.seed)
    net, given = model(), job.batches()
    optimizer = job.optimizer(net.parameters())
    schedule = job.schedule(optimizer)
    losses, norms = [], []
    for _ in range(job.steps):
        step = [next(given) for _ in range(job.accumulate)]
        counts = [int(tokens(b)) if job.tokens else 1 for b in step]
        optimizer.zero_grad()
        loss = sum(net(**b) * n / sum(counts) for b, n in zip(step, counts, strict=True) if n)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), job.clip_norm or math.inf)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms, dict(net.named_parameters())


def parallel(module, job):
    seed_all(job.seed)
    run, found = start(module, job), []
    train(run, job, CPU, found.append)
    weights = {name: whole(p) for name, p in module.named_parameters()}
    return [r.loss for r in found], [r.gradient_norm for r in found], weights


def compare(text, names=tuple(JOBS)):
    """Each job from the same weights, in one module for all the shapes that they need."""
    others = {shapes_of(*call): call for name in names for call in JOBS[name].other_calls()}
    module = ShapeVariants(model(), sw.Plan.from_json(text), list(others.values()), seed=PLAIN.seed)
    begin = {name: p.detach().clone() for name, p in module.named_parameters()}
    for name in names:
        job = JOBS[name]
        with torch.no_grad():
            for key, p in module.named_parameters():
                p.copy_(begin[key])
        losses, norms, weights = serial(job)
        ours = parallel(module, job)
        assert ours[0] == pytest.approx(losses, rel=1e-9), name
        if job.clip_norm:
            assert ours[1] == pytest.approx(norms, rel=1e-9), name
        for key, value in ours[2].items():
            expected = weights[key].detach()
            torch.testing.assert_close(
                value.reshape(expected.shape),
                expected,
                rtol=1e-9,
                atol=1e-11,
                msg=lambda text, key=key, name=name: f"{name}: {key}: {text}",
            )


def own_samples(text):
    """Which samples this rank read in one pass, and the mean loss of them all in evaluation."""
    samples = Samples(12)
    job = replace(PLAIN, data=samples, evaluation=Samples(12), steps=2)
    module = ShapeVariants(job.model(), sw.Plan.from_json(text), job.other_calls())
    run = start(module, job)
    read_own_samples(run, job)
    before = evaluate(module, job, CPU)
    train(run, replace(job, evaluation=None, steps=2), CPU, lambda record: None)
    return samples.read, before


def exported(text, file):
    """Trained and out under one plan, into a plain model: the logits of one device, trained so."""
    module = ShapeVariants(model(), sw.Plan.from_json(text), [], seed=PLAIN.seed)
    parallel(module, PLAIN)
    export_safetensors(module, Net(), file)
    torch.distributed.barrier()
    plain, one = Net().double(), model()
    load_safetensors(plain, file)
    trained = serial(PLAIN)[2]
    with torch.no_grad():
        for name, value in trained.items():
            one.get_parameter(name).copy_(value)
        assert module.loss(batch(1)).item() == pytest.approx(plain(**batch(1)).item(), rel=1e-12)
        found, expected = (net.logits(batch(1)["ids"]) for net in (plain, one))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert plain.head.weight is plain.embed.weight
    torch.distributed.barrier()  # the file is another plan's next


def every_check(texts, folder):
    for text in texts.values():
        exported(text, f"{folder}/model.safetensors")
    texts = [texts[name] for name in ("fully sharded", "tensor parallel")]
    for text in texts:
        compare(text)
    return own_samples(texts[0])


@pytest.fixture(scope="module")
def frontiers():
    graph = sw.capture(model(), (), batch(0))
    return {
        n: {
            p.name: plan_to_json(p)
            for p in sw.search(graph, sw.Machine.preset(f"{n}xcpu")).baselines
        }
        for n in (2, 4)
    }


@pytest.mark.ranks
def test_every_feature_is_right_on_two_ranks(frontiers, tmp_path):
    names = ("fully sharded", "tensor parallel", "data parallel")
    texts = {name: frontiers[2][name] for name in names}
    read = run_ranks(2, every_check, texts, str(tmp_path))
    assert sorted(i for mine, _ in read for i in mine) == list(range(12))  # each once, by one
    assert all(len(mine) == 6 for mine, _ in read)
    serial = model()
    seed_all(PLAIN.seed)
    batches = islice(replace(PLAIN, data=Samples(12), shuffle=False).batches(), 2)
    with torch.no_grad():
        expected = sum(serial(**b).item() for b in batches) / 2
    assert [loss for _, loss in read] == pytest.approx([expected] * 2, rel=1e-10)


@pytest.mark.ranks
def test_every_feature_is_right_on_four_ranks(frontiers, tmp_path):
    text = frontiers[4]["fully sharded x tensor parallel"]
    run_ranks(4, on_one_shape, text, f"{tmp_path}/model.safetensors")


def on_one_shape(text, file):
    exported(text, file)
    compare(text, ("clipped hard", "accumulated over tokens"))
    module = sw.parallelize(model(), sw.Plan.from_json(text))
    module.forward_backward(batch(0))
    norm = Clipping(dict(module.named_parameters())).norm().item()
    found = [whole(p.grad).norm() for p in module.parameters() if p.grad is not None]
    assert norm == pytest.approx(torch.stack(found).norm().item(), rel=1e-12)


def on_stages(text, folder):
    """Stages clip, accumulate, take other shapes and export; a run of theirs is saved.

    Returned are its weights, and what is said of a number that overflows.
    """
    assert sw.Plan.from_json(text).stages == 2
    compare(text, ("clipped hard", "accumulated over tokens", "a dataset with a rest", "padded"))
    exported(text, f"{folder}/model.safetensors")
    run, checkpoints = saved_run(text, folder)
    train(run, replace(PLAIN, steps=2), CPU, lambda record: None)
    checkpoints.save(run)
    weights = {name: whole(p).clone() for name, p in run.module.named_parameters()}
    large = {"scale": 1e308, "down.bias": 1e3}
    with torch.no_grad():
        for name, p in run.module.named_parameters():
            p.fill_(large[name]) if name in large else None
    return weights, run.module.origin_of_nonfinite(batch(1), torch.tensor([0, 0]))


def resumed(text, folder):
    """From the stages' checkpoint: the weights there, and the losses from there on."""
    run, checkpoints = saved_run(text, folder)
    saved, _ = checkpoints.resume(run)
    assert saved.step == 2
    weights = {name: whole(p).clone() for name, p in run.module.named_parameters()}
    found = []
    train(run, PLAIN, CPU, found.append)
    return weights, [record.loss for record in found]


def saved_run(text, folder):
    plan = sw.Plan.from_json(text)
    module = ShapeVariants(model(), plan, [], seed=PLAIN.seed)
    return start(module, PLAIN), Checkpoints(f"{folder}/runs", plan)


@pytest.mark.ranks
def test_a_pipeline_does_too_and_others_go_on_from_its_checkpoint(frontiers, tmp_path):
    graph = sw.capture(model(), (), batch(0))
    machine = sw.Machine.preset("2xcpu")
    staged = sw.search(graph, machine, stages=(2,), micro_batches=(2,))
    (text, *_) = (plan_to_json(plan) for plan in staged if plan.stages == 2)
    stages = run_ranks(2, on_stages, text, str(tmp_path))
    stages, blamed = zip(*stages, strict=True)
    assert blamed[0] == blamed[1]
    assert blamed[0].startswith("mul in the model itself") and "test_training_features" in blamed[0]
    assert stages[0].keys() != stages[1].keys()
    ((weights, losses), _) = run_ranks(2, resumed, frontiers[2]["fully sharded"], str(tmp_path))
    for mine in stages:
        for name, value in mine.items():
            assert torch.equal(value, weights[name]), name
    assert losses == pytest.approx(serial(PLAIN)[0][2:], rel=1e-9)
