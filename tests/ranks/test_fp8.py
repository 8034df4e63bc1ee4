"""Products in 8 bits on ranks: as one device that scales the tiles of each rank computes them."""

import shutil
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.runtime.sharded_ops.fp8_linear import Fp8Linear
from tests.harness.ranks import run_ranks, whole
from tests.harness.rotation import rotating

pytestmark = pytest.mark.ranks

ROWS, WIDTH, INNER, CLASSES = 32, 64, 96, 48
RECIPES, RATE = ("tensorwise", "rowwise"), 0.1
CASES = {  # strategy: parts of the batch, and tiles of weights, that have scales of their own
    "dp_replicate=2 zero=0": (2, 1),
    "dp_shard=2": (2, 1),
    "dp_shard=2 mb=2 ac=full": (4, 1),
    "tp=2 zero=0": (1, 2),
    "pp=2 mb=4 schedule=InterleavedZeroBubble": (4, 1),
}
COMPILED = "dp_shard=2"
# The recipe whose kernels a commit compiles; operators of the other are only traced as it does.
INDUCTOR = rotating(RECIPES, 2)
has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))


class Net(nn.Module):
    """Two MLPs whose four products are in 8 bits, and a head whose product is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList((nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH))) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels):
        for up, down in self.layers:
            x = x + down(F.relu(up(x)))
        return F.cross_entropy(self.head(x).float(), labels)


def batch():
    g = torch.Generator().manual_seed(1)
    # Rows of other sizes, so that scales of their halves differ.
    x = torch.randn(ROWS, WIDTH, generator=g) * torch.linspace(0.1, 3, ROWS)[:, None]
    return x, torch.randint(CLASSES, (ROWS,), generator=g)


def gradients(recipe, parts, tiles):
    """Loss and gradients of one device: `parts` of the batch, and weights in `tiles`."""
    net, linear = Net(), Fp8Linear(f"torchao:{recipe}")
    weights = {name: p.detach().bfloat16().requires_grad_() for name, p in net.named_parameters()}
    total, losses = {name: torch.zeros(p.shape) for name, p in weights.items()}, []
    for x, labels in zip(*(one.chunk(parts) for one in batch()), strict=True):
        x = x.bfloat16()
        for number in range(len(net.layers)):
            up, up_bias, down, down_bias = (
                weights[f"layers.{number}.{i}.{kind}"]
                for i in (0, 1)
                for kind in ("weight", "bias")
            )
            given = x.clone()  # whose gradient is summed over tiles first
            inner = [
                F.relu(linear(given, w, b))
                for w, b in zip(up.chunk(tiles), up_bias.chunk(tiles), strict=True)
            ]
            bias = [down_bias] + [None] * (tiles - 1)
            x = x + sum(
                linear(y, w, b) for y, w, b in zip(inner, down.chunk(tiles, 1), bias, strict=True)
            )
        given, (head, bias) = x.clone(), (weights[f"head.{kind}"] for kind in ("weight", "bias"))
        logits = [
            F.linear(given, *tile)
            for tile in zip(head.chunk(tiles), bias.chunk(tiles), strict=True)
        ]
        logits = torch.cat(logits, 1).float()
        loss = F.cross_entropy(logits, labels, reduction="sum") / ROWS
        for name, grad in zip(weights, torch.autograd.grad(loss, weights.values()), strict=True):
            total[name] += grad.float()
        losses.append(loss.item())
    return sum(losses), total


def plans():
    # With its cast, as gradients of fused logits may be rounded the other way.
    graph = sw.capture(Net(), batch(), precision="bf16", logits="model")
    return {
        (recipe, strategy): sw.price(graph, "2xH100", f"{strategy} fp8={recipe} compile=regional")
        for recipe in RECIPES
        for strategy in CASES
    }


def gradients_of(module):
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def trained(text):
    """What a plan gives: by `forward_backward`, in a loop of one's own, evaluated, and a step."""
    module = sw.parallelize(Net(), sw.Plan.from_json(text))
    loss = module.forward_backward(batch()).item()
    found = {"loss": loss, "gradients": gradients_of(module)}
    if sw.Plan.from_json(text).pipeline is None:
        module.zero_grad()
        module(*batch()).backward()
        found["loop"] = gradients_of(module)
        with torch.no_grad():
            found["evaluated"] = module.eval()(*batch()).item()
        module.train()
    module.zero_grad()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    module.train_step(optimizer, batch())
    found["weights"] = {name: whole(p) for name, p in module.state_dict().items()}
    return found


def on_a_rank(texts):
    return [trained(text) for text in texts]


def assert_close(found, expected, name):
    """Equal but for the order of sums, which is the processor's, before they are bfloat16.

    A scale of another tile changes percents.
    """
    found = found.reshape(expected.shape)
    apart, size = (found - expected).norm(), expected.norm()
    most = 1e-3 if name[-1].endswith("bias") else 1e-4
    assert found.dtype is torch.float32 and apart <= most * size, (name, apart / size)


def test_every_kind_of_plan_computes_with_the_scales_of_its_tiles():
    priced = plans()
    texts = [plan_to_json(replace(plan, compiled=False)) for plan in priced.values()]
    begin = dict(Net().named_parameters())
    for recipe, strategy in priced:
        # The scales of one device are others, so the tiles are seen in what is compared below.
        one, tiled = (gradients(recipe, *how)[1] for how in ((1, 1), CASES[strategy]))
        apart = [(one[n] - tiled[n]).norm() / one[n].norm() for n in one if "0.weight" in n]
        assert min(apart) > 1e-3, (recipe, strategy)
    for rank in run_ranks(2, on_a_rank, texts):
        for (recipe, strategy), found in zip(priced, rank, strict=True):
            loss, expected = gradients(recipe, *CASES[strategy])
            assert found["loss"] == pytest.approx(loss, rel=1e-6)
            assert found.get("evaluated", loss) == pytest.approx(loss, rel=1e-6)
            for part in ("gradients", "loop"):
                for name, grad in found.get(part, {}).items():
                    assert_close(grad, expected[name], (recipe, strategy, part, name))
            assert found["gradients"].keys() == found.get("loop", found["gradients"]).keys()
            for name, weight in found["weights"].items():
                assert_close(weight, begin[name] - RATE * expected[name], (strategy, name))


def test_rows_that_no_rank_splits_have_the_scales_of_one_device():
    """Under data parallelism forward passes are those of one device, but of `tensorwise`."""
    (whole_rows, _), (parts, _) = (gradients("rowwise", n, 1) for n in (1, 2))
    assert parts == pytest.approx(whole_rows, rel=1e-6)
    (whole_batch, _), (parts, _) = (gradients("tensorwise", n, 1) for n in (1, 2))
    assert parts != pytest.approx(whole_batch, rel=1e-5)


def test_plans_say_that_scales_are_of_tiles_and_verify_multiplies_in_float64():
    plan = replace(plans()["rowwise", "dp_shard=2"], compiled=False)
    text = " ".join(plan.explain().split())
    assert "fp8 rowwise as torchao" in text and "scales are of a rank's tiles" in text
    report = sw.verify(Net(), plan, batch())
    assert report.ok and "with scales of each rank's tiles" in str(report)


def compiled(texts):
    found = {}
    compile_with = fx.GraphModule.compile
    for recipe, text in texts.items():
        backend = "inductor" if recipe in INDUCTOR else "aot_eager"
        fx.GraphModule.compile = partialmethod(compile_with, backend=backend)
        with inductor.patch(emulate_precision_casts=True):  # rounds where eager code does
            module = sw.parallelize(Net(), sw.Plan.from_json(text))
            found[recipe] = module.forward_backward(batch()).item(), gradients_of(module)
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler, reason="no C++ compiler")
def test_compiled_layers_compute_the_same():
    priced = {recipe: plan_to_json(plans()[recipe, COMPILED]) for recipe in RECIPES}
    for rank in run_ranks(2, compiled, priced):
        for recipe, (loss, grads) in rank.items():
            expected_loss, expected = gradients(recipe, *CASES[COMPILED])
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            for name, grad in grads.items():
                assert_close(grad, expected[name], (recipe, name))
