"""`precision="bf16"`: the recipe of one device, written out below, under every kind of plan."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.report.text.explain import explain
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.data.randomness import seed_all
from shardwright.train.job import Job
from shardwright.train.loop import start, train
from tests.harness.ranks import run_ranks, whole

ROWS, WIDTH = 8, 16
CPU = torch.device("cpu")


class Net(nn.Module):
    """A tied embedding, a norm, a frozen layer; numbers as inputs, the loss in float32."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.fixed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, x, labels):
        h = self.embed(ids) + self.fixed(x)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        return nn.functional.cross_entropy(self.head(h).float(), labels)


class Sums(nn.Module):
    """The gradient of `w` is the sum of its input: of 256 and 1, of which bfloat16 loses the 1."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, 2))

    def forward(self, x):
        return (x * self.w).float().sum()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(WIDTH, (ROWS,), generator=g)
    return {"ids": ids, "x": torch.randn(ROWS, WIDTH, generator=g), "labels": ids.roll(1)}


def model():
    torch.manual_seed(0)
    return Net()


HALVED = (
    "dp_replicate=2 zero=0",
    "dp_replicate=2 zero=0 mb=2 sync=last",
    "dp_shard=2",
    "dp_shard=2 mb=2 sync=every",
    "dp_shard=2 mb=2 zero=1",
)

JOB = Job(
    model,
    batch(0),
    lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.3, momentum=0.9),
    [batch(1), batch(2), batch(3)],
    4,
    clip_norm=0.5,
    precision="bf16",
)


def recipe():
    """Losses and weights by plain PyTorch: bfloat16 casts, float32 parameters and gradients."""
    net, losses = model(), []
    optimizer = JOB.optimizer(net.parameters())
    given = JOB.batches()
    for _ in range(JOB.steps):
        optimizer.zero_grad()
        narrow = {name: p.bfloat16() for name, p in net.named_parameters()}
        b = next(given)
        loss = functional_call(net, narrow, kwargs={**b, "x": b["x"].bfloat16()})
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), JOB.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in net.named_parameters()}


def ours(text):
    seed_all(JOB.seed)
    module = ShapeVariants(model(), sw.Plan.from_json(text), [], seed=JOB.seed)
    run, found = start(module, JOB), []
    train(run, JOB, CPU, found.append)
    for p in module.parameters():
        assert p.dtype is torch.float32 and (p.grad is None or p.grad.dtype is torch.float32)
    assert all(s.dtype is torch.float32 for v in run.optimizer.state.values() for s in v.values())
    return [r.loss for r in found], {n: whole(p) for n, p in module.named_parameters()}


def summed(text):
    """The gradient of `Sums` on a batch whose two rows are 256 and 1, one on each rank."""
    module = sw.parallelize(Sums(), sw.Plan.from_json(text))
    module.forward_backward((torch.tensor([[256.0, 256], [1, 1]]),))
    return whole(module.w.grad).flatten().tolist()


def every(plans, sums):
    return [ours(text) for text in plans], [summed(text) for text in sums]


def plans(devices, reduce="stored", logits="fused", **options):
    graph = sw.capture(model(), (), batch(0), precision="bf16", reduce=reduce, logits=logits)
    return sw.search(graph, sw.Machine.preset(f"{devices}xcpu"), **options)


def close(found, expected):
    """To what bfloat16 leaves of numbers that are summed in another order."""
    assert found[0] == pytest.approx(expected[0], rel=0.01)
    begin = dict(model().named_parameters())
    for name, value in found[1].items():
        went = expected[1][name] - begin[name]
        apart = value.reshape(went.shape) - expected[1][name]
        assert apart.norm() <= 0.03 * went.norm(), name


def test_one_device_follows_the_recipe():
    # With its cast, as gradients of fused logits may be rounded the other way.
    losses, weights = ours(plan_to_json(plans(1, logits="model")[0]))
    expected = recipe()
    assert losses == expected[0]
    for name, value in weights.items():
        torch.testing.assert_close(
            value.reshape(expected[1][name].shape), expected[1][name], rtol=1e-6, atol=1e-7
        )


def test_batch_norms_keep_their_parameters_and_inputs_are_cast():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 1))
    graph = sw.capture(net, (torch.randn(4, 3, 6, 6),), precision="bf16")
    kinds = {name: tensor.dtype for name, tensor in graph.tensor.items()}
    assert kinds["0.weight"] == kinds["3.weight"] == "bfloat16"
    assert kinds["1.weight"] == kinds["1.running_mean"] == kinds["args.0"] == "float32"
    assert kinds[graph.outputs[0]] == "bfloat16"
    assert all(p.dtype is torch.float32 for p in net.parameters())  # as they were
    with pytest.raises(ValueError, match="float64; give the model in float32"):
        sw.capture(net.double(), (torch.randn(4, 3, 6, 6),), precision="bf16")


def test_a_plan_says_what_masters_cost():
    wide = sw.search(sw.capture(model(), (), batch(0)), sw.Machine.preset("2xcpu"))
    narrow, half = plans(2), plans(2, "bf16")
    named = [{p.name: p for p in f.baselines}["data parallel"] for f in (wide, narrow, half)]
    held = [sum(p.bytes for p in plan.parameters) for plan in named]
    trained = sum(p.numel() for p in model().parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model().parameters() if not p.requires_grad)
    assert held[0] == 16 * trained + 4 * frozen
    assert held[1] == held[2] == held[0] + 2 * (trained + frozen)  # the casts
    sums = [{t.value: t.bytes for t in plan.transfers} for plan in named]
    assert sums[0]["up.weight"] == sums[1]["up.weight"]  # gradients are summed in float32
    assert sums[2]["up.weight"] * 2 == sums[1]["up.weight"]
    assert "float32" in explain(named[1]) and "precision" in explain(named[1])
    assert "reduce        bf16: " in explain(named[2])
    again = sw.Plan.from_json(plan_to_json(named[2]))
    assert again.numerics.precision == again.numerics.reduce == "bf16"
    with pytest.raises(ValueError, match="add precision='bf16'"):
        sw.capture(model(), (), batch(0), reduce="bf16")


@pytest.mark.ranks
def test_every_kind_of_plan_follows_the_recipe():
    expected = recipe()
    two = plans(2)
    named = {p.name: p for p in two.baselines}
    kinds = [named["fully sharded"], named["tensor parallel"]]
    kinds += [next(p for p in plans(2, micro_batches=(2,)).baselines if p.name == "fully sharded")]
    kinds += [next(p for p in plans(2, stages=(2,), micro_batches=(2,)) if p.stages == 2)]
    stored = sw.capture(model(), (), batch(0), precision="bf16")
    kinds.append(sw.price(stored, sw.Machine.preset("2xcpu"), HALVED[-1]))
    half = sw.capture(model(), (), batch(0), precision="bf16", reduce="bf16")
    kinds += [sw.price(half, sw.Machine.preset("2xcpu"), text) for text in HALVED]
    sums = []
    for reduce in ("stored", "bf16"):
        graph = sw.capture(Sums(), (torch.zeros(2, 2),), precision="bf16", reduce=reduce)
        rows = {p.name: p for p in sw.search(graph, sw.Machine.preset("2xcpu")).baselines}
        sums += [plan_to_json(rows[name]) for name in ("data parallel", "fully sharded")]
    results = run_ranks(2, every, [plan_to_json(p) for p in kinds], sums)
    for found, gradients in results:
        for one in found:
            close(one, expected)
        # The sum of 256 and 1 is no bfloat16.
        assert gradients == [[257.0, 257.0]] * 2 + [[256.0, 256.0]] * 2
