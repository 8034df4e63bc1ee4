"""`rng="fast"` on ranks: tiles draw their own numbers, replicas the same, again with the seed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.report.text.explain import explain
from shardwright.runtime.random.fused_rng import FastAttention, FastDropout
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return {"out": nn.functional.dropout(x * self.scale, 0.5)}


class Block(nn.Module):
    """Attention with dropout, dropout, and a loss."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(
            *heads.unbind(0), dropout_p=0.2 if self.training else 0.0, is_causal=True
        )
        y = self.out(mixed.transpose(1, 2).flatten(2))
        return nn.functional.dropout(y, 0.2, self.training).square().mean()


def example():
    torch.manual_seed(0)
    return Block().double(), {"x": torch.randn(5, 7, 12, dtype=torch.float64)}


def planned(model, batch, choice, rng="fast"):
    graph = sw.capture(model, (), batch, rng=rng)
    frontier = sw.search(graph, sw.Machine.preset("2xcpu"))
    return plan_to_json({plan.name: plan for plan in frontier.baselines}[choice])


def test_fast_dropout_on_two_ranks():
    plans = {choice: planned(*example(), choice) for choice in ("data parallel", "tensor parallel")}
    rows = {"x": torch.ones(2, 1000)}
    run_ranks(2, _check, plans, planned(Dropped(), rows, "data parallel"), rows)


def _check(plans, split, rows):
    drawn = sw.parallelize(Dropped(), sw.Plan.from_json(split), seed=3)(**rows)["out"]
    agree = ((drawn[0] > 0) == (drawn[1] > 0)).sum().item()
    assert abs(agree - 500) < 4 * 250**0.5, "the rows lie on two ranks, which draw on their own"
    for name, text in plans.items():
        _trains_alike(name, text)


def _trains_alike(name, text):
    first, module = _curve(text, seed=3)
    kinds = {type(part) for part in module.modules()}
    assert {FastAttention, FastDropout} <= kinds, "the kernels are kept"
    assert _curve(text, seed=3)[0] == first, "a seed says it all"
    assert not set(_curve(text, seed=4)[0]) & set(first)
    found = [None, None]
    weights = {key: whole(p) for key, p in module.named_parameters()}
    dist.all_gather_object(found, (first, weights))
    assert found[0][0] == found[1][0], f"{name}: replicas that draw apart have losses that differ"
    for key, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], value, rtol=0, atol=0)
    model, batch = example()
    weights = {key: p.reshape(model.get_parameter(key).shape) for key, p in weights.items()}
    model.load_state_dict(weights)
    torch.testing.assert_close(module.eval()(**batch), model.eval()(**batch))


def _curve(text, seed):
    model, batch = example()
    module = sw.parallelize(model, sw.Plan.from_json(text), seed=seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [module.train_step(optimizer, batch).item() for _ in range(4)], module


def test_verify_compares_such_a_plan_with_the_dropout_of_the_exact_one():
    model, batch = example()
    plan = sw.Plan.from_json(planned(model, batch, "tensor parallel"))
    report = sw.verify(model, plan, (), batch)
    assert report.ok and report.max_gradient_error < 1e-8
    (note,) = report.notes
    assert note.startswith("rng='fast' draws other numbers under every plan, so they are not")
    assert note in str(report)


def test_a_plan_runs_as_it_was_captured():
    model, batch = example()
    fast, exact = (sw.capture(model, (), batch, rng=rng) for rng in ("fast", "exact"))
    assert fast.fingerprint != exact.fingerprint
    simple = [sw.capture(Dropped(), (), {"x": torch.ones(2, 3)}, rng=r) for r in ("fast", "exact")]
    assert simple[0].ops == simple[1].ops and simple[0].fingerprint != simple[1].fingerprint
    plan = sw.Plan.from_json(planned(model, batch, "data parallel"))
    assert plan.numerics.rng == "fast" and "rng           fast: " in explain(plan)
    with pytest.raises(ValueError, match="rng='quick' is not known; write rng='exact' or"):
        sw.capture(model, (), batch, rng="quick")
