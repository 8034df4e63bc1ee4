"""`precision="fp16"`: the recipe of one device with `GradScaler`, under every kind of plan."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.func import functional_call

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.parameters.loss_scaling import spread_overflow
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.tracing.arguments import BatchError
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import start, train
from tests.harness.ranks import run_ranks, whole

ROWS, WIDTH, STEPS = 8, 16, 12
FIRST = 2.0**46
CPU = torch.device("cpu")
STRATEGIES = (
    "dp_replicate=2 zero=0",
    "dp_shard=2",
    "dp_shard=2 mb=2",
    "tp=2",
    "pp=2 mb=2",
)


class Faint(nn.Module):
    """Without scaling, its gradients are smaller than the least float16."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return self.last(x).float().square().mean() * 1e-6


def model():
    torch.manual_seed(0)
    return Faint()


def batch(seed):
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))}


JOB = Job(
    model,
    batch(0),
    lambda ps: torch.optim.SGD(list(ps), lr=3e4),
    [batch(1), batch(2), batch(3)],
    STEPS,
    precision="fp16",
)


def scaler():
    """Its first step overflows under every plan, and so does every sixth one after five good ones.

    Sums over a part of the batch are smaller, so that smaller factors would give other scales.
    """
    return GradScaler(
        "cpu",
        init_scale=FIRST,
        growth_factor=2.0**10,
        backoff_factor=2.0**-10,
        growth_interval=5,
    )


def recipe(job=JOB):
    """Losses, scales and weights by plain PyTorch."""
    net, losses, scales, scale = model(), [], [], scaler()
    optimizer = job.optimizer(net.parameters())
    given = job.batches()
    for _ in range(STEPS):
        optimizer.zero_grad()
        narrow = {name: p.half() for name, p in net.named_parameters()}
        loss = functional_call(net, narrow, kwargs={"x": next(given)["x"].half()})
        scale.scale(loss).backward()
        if job.clip_norm is not None:
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), job.clip_norm)
        scale.step(optimizer)
        scale.update()
        losses.append(loss.item())
        scales.append(scale.get_scale())
    return losses, scales, {name: p.detach() for name, p in net.named_parameters()}


def ours(text, job):
    """The same by the loop of `shardwright run`."""
    seed_all(job.seed)
    module, records, scales = ShapeVariants(model(), sw.Plan.from_json(text), []), [], []
    run = start(module, job, scaler())

    def report(record):
        records.append(record)
        scales.append(run.scaler.get_scale())

    train(run, job, CPU, report)
    skipped = [before > after for before, after in zip([FIRST, *scales], scales, strict=False)]
    assert [one.skipped for one in records] == skipped
    again = start(module, job, GradScaler("cpu"))
    again.restore(json.loads(json.dumps(run.record())), run.step)
    assert again.scaler.state_dict() == run.scaler.state_dict()
    weights = {name: whole(p).detach() for name, p in module.named_parameters()}
    return [one.loss for one in records], scales, weights


def by_hand(text):
    """`train_step` with a scaler, and the loss scaled by the caller."""
    plan = sw.Plan.from_json(text)
    module = sw.parallelize(model(), plan)
    optimizer, scale = JOB.optimizer(module.parameters()), scaler()
    given = JOB.batches()
    losses = [module.train_step(optimizer, next(given), scale).item() for _ in range(STEPS)]
    weights = {name: whole(p).detach() for name, p in module.named_parameters()}
    if plan.stages > 1:
        return losses, weights, None
    module, scale = sw.parallelize(model(), plan), scaler()
    optimizer, given, refused = JOB.optimizer(module.parameters()), JOB.batches(), ""
    for _ in range(STEPS):
        optimizer.zero_grad()
        try:
            scale.scale(module(**next(given))).backward()
        except BatchError as e:
            refused = str(e)
            break
        scale.step(optimizer)
        scale.update()
    return losses, weights, refused or {n: whole(p).detach() for n, p in module.named_parameters()}


def every(texts):
    clipped = replace(JOB, clip_norm=1e-5)
    return [(ours(text, JOB), ours(text, clipped), by_hand(text)) for text in texts]


def plan_of(text, devices=2):
    graph = sw.capture(model(), (), batch(0), precision="fp16")
    return sw.price(graph, sw.Machine.preset(f"{devices}xcpu"), text)


def close(found, expected, begin):
    """To what float16 leaves of numbers that are summed in another order."""
    for name, value in found.items():
        went = expected[name] - begin[name]
        apart = value.reshape(went.shape) - expected[name]
        assert went.norm() > 0 and apart.norm() <= 0.01 * went.norm(), name


def test_without_a_scale_nothing_would_be_learned():
    """So that the other tests show something."""
    net = model()
    narrow = {name: p.half() for name, p in net.named_parameters()}
    functional_call(net, narrow, kwargs={"x": batch(1)["x"].half()}).backward()
    assert not net.up.weight.grad.any()


def test_what_is_captured():
    graph = sw.capture(model(), (), batch(0), precision="fp16", reduce="fp16")
    assert graph.tensor["up.weight"].dtype == "float16"
    assert graph.numerics.precision == "fp16"
    with pytest.raises(ValueError, match="add precision='fp16'"):
        sw.capture(model(), (), batch(0), precision="bf16", reduce="fp16")
    assert sw.verify(model(), plan_of("dp_shard=2"), (), batch(0)).ok


@pytest.mark.ranks
def test_every_kind_of_plan_follows_the_recipe():
    begin = dict(model().named_parameters())
    expected, clipped = recipe(), recipe(replace(JOB, clip_norm=1e-5))
    scales = expected[1]
    assert scales[0] < FIRST and max(scales[1:]) > min(scales), "it skips, and grows"
    for results in run_ranks(2, every, [plan_to_json(plan_of(text)) for text in STRATEGIES]):
        for text, (plain, short, hand) in zip(STRATEGIES, results, strict=True):
            assert plain[1] == scales and short[1] == clipped[1], text
            assert plain[0] == pytest.approx(expected[0], rel=0.01)
            close(plain[2], expected[2], begin)
            close(short[2], clipped[2], begin)
            losses, weights, scaled_by_caller = hand
            assert losses == pytest.approx(expected[0], rel=0.01)
            close(weights, expected[2], begin)
            if "pp=" in text:
                assert scaled_by_caller is None
            elif "mb=" in text:
                assert "use forward_backward(batch, scaler=scaler)" in scaled_by_caller
            else:
                close(scaled_by_caller, expected[2], begin)


def spread():
    """Gradients after `spread_overflow`: first without, then with one on rank 1 alone."""
    found = []
    for bad in (1.0, float("inf")):
        parameter = nn.Parameter(torch.zeros(3))
        parameter.grad = torch.tensor([1.0, bad if dist.get_rank() == 1 else 1.0, 2.0])
        spread_overflow([parameter])
        found.append(bool(parameter.grad.isfinite().all()))
    return found


@pytest.mark.ranks
def test_an_overflow_on_one_rank_is_one_on_all():
    assert run_ranks(2, spread) == [[True, False], [True, False]]


def refused(text):
    with pytest.raises(PlanError, match="plan with precision='bf16', or without allow_async"):
        sw.parallelize(model(), sw.Plan.from_json(text))


@pytest.mark.ranks
def test_asynchronous_stages_are_refused():
    graph = sw.capture(model(), (), batch(0), precision="fp16")
    found = sw.search(graph, sw.Machine.preset("2xcpu"), "sgd", stages=(2,), allow_async=True)
    plan = next(plan for plan in found if plan.is_asynchronous)
    run_ranks(2, refused, plan_to_json(plan))
