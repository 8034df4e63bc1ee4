"""A model with a block that export cannot follow trains on two ranks as on one device."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks


class Branch(nn.Module):
    """Decides on its input; draws dropout of its own; counts its calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        if x.sum() > 0:
            return self.drop(self.up(x))
        return self.down(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), Branch(), nn.Linear(8, 5)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.middle(self.first(x)).relu()), y)


def example():
    torch.manual_seed(0)
    batch = {"x": torch.randn(7, 6, dtype=torch.float64), "y": torch.randint(5, (7,))}
    return Net().double(), batch


def plans():
    model, batch = example()
    baselines = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"), "sgd").baselines
    known = {plan.name: plan for plan in baselines}
    return [known[name] for name in ("data parallel", "fully sharded", "tensor parallel")]


def test_it_trains_under_any_plan_as_on_one_device():
    run_ranks(2, _trains_alike, [plan_to_json(plan) for plan in plans()])


def _trains_alike(texts):
    for text in texts:
        model, batch = example()
        module = sw.parallelize(model, sw.Plan.from_json(text))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, module)]
        for sign in (1, -1, 1):
            given = {**batch, "x": sign * batch["x"]}
            for one, optimizer in zip((model, module), optimizers, strict=True):
                optimizer.zero_grad()
                loss = one(**given)
                loss.backward()
                if one is model:
                    expected = loss.detach()
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=1e-12)
            for key, parameter in model.named_parameters():
                mine, theirs = whole(module.get_parameter(key).grad), parameter.grad
                if mine is None or theirs is None:  # the branch that was not taken
                    assert mine is theirs is None, key
                    continue
                mine = mine.reshape(parameter.shape)
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
        assert module.get_buffer("middle.calls") == model.middle.calls == 3


def test_verify_runs_such_a_module_in_processes_of_its_own():
    model, batch = example()
    model.middle.drop.p = 0.5  # drawn alike on every rank and on one device
    (plan, *_) = plans()
    report = sw.verify(model, plan, (), batch)
    assert report.ok and report.max_gradient_error < 1e-10


def test_a_module_that_cannot_be_sent_is_a_mistake_that_is_told():
    class Local(Branch):
        pass

    model, batch = example()
    model.middle = Local().double()
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("2xcpu"), optimizer="sgd")
    with pytest.raises(PlanError, match=r"where middle cannot be sent .* define its class at the"):
        sw.verify(model, plan, (), batch)
