"""`pm.eval()` and `pm.train()` give what the module gives after them.

A user trained with `pm = sw.parallelize(model, plan)` in a loop of their own and evaluated between
epochs with `pm.eval(); pm(x)`: the graph of training ran, batch norm took the batch's statistics
(0.395 where the model gives 0.0318) and `if self.training` stayed where it was. A model that was
planned in evaluation mode never trained after `pm.train()`. Only `Job.evaluation` did it right.
"""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.tracing.arguments import BatchError
from tests.harness.ranks import run_ranks, whole

ONE = sw.Machine.preset("1xcpu")


class Net(nn.Module):
    """Batch norm, dropout, a loss of training alone, and more that `self.training` decides."""

    def __init__(self, drop=0.3):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.frozen, self.drop = nn.BatchNorm1d(8), nn.Dropout(drop)
        self.aside = nn.Linear(8, 4)

    def forward(self, x, y):
        hidden = self.drop(torch.relu(self.frozen(self.norm(self.up(x)))))
        smoothing = 0.1 if self.training else 0.0
        loss = nn.functional.cross_entropy(self.down(hidden), y, label_smoothing=smoothing)
        if self.training:
            loss = loss + 0.3 * nn.functional.cross_entropy(self.aside(hidden), y)
        return loss


class Answers(Net):
    """Returns the loss in training, and what it answers in evaluation."""

    def forward(self, x, y):
        return super().forward(x, y) if self.training else {"logits": self.down(self.up(x)), "y": y}


class Both(Net):
    """Returns what it answers beside the loss."""

    def forward(self, x, y):
        return {"loss": super().forward(x, y), "logits": self.down(self.up(x))}


class Keeps(Net):
    """Freezes its second batch norm whenever it is switched, as many detectors do."""

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self


class Scaling(nn.Module):
    """Has a tensor that is neither parameter nor buffer, and a module that reads a value."""

    def __init__(self):
        super().__init__()
        self.up, self.scale, self.odd = nn.Linear(6, 4), torch.tensor(3.0).double(), Odd()

    def forward(self, x, y):
        found = self.odd(self.up(x) * (self.scale if self.training else 1.0))
        return nn.functional.cross_entropy(found, y)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.training and x.sum().item() > 1e9:
            return x
        return x * self.weight * (2 if self.training else 5)


def batch():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    return {"x": x, "y": torch.randint(4, (6,), generator=generator)}


def made(kind, *args):
    torch.manual_seed(0)
    model = kind(*args).double()
    for buffer in model.buffers():  # as after some steps
        if buffer.is_floating_point():
            buffer.add_(0.3 * torch.rand_like(buffer))
    return model


def both(model):
    """The module itself and its parallel module on one device."""
    plan = sw.plan(model, (), batch(), machine=ONE)
    return copy.deepcopy(model), sw.parallelize(model, plan)


def equal(pm, model, *, gradients=True):
    """Outputs, gradients and buffers of one call of each."""
    for one in (pm, model):
        one.zero_grad()
    ours, theirs = pm(**batch()), model(**batch())
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-12, atol=1e-12)
        return
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if gradients:
        ours.backward()
        theirs.backward()
    mine = dict(pm.named_parameters())
    for name, p in model.named_parameters():
        got = mine[name].grad if name in mine else None
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        got = torch.zeros_like(p) if got is None else whole(got).reshape(p.shape)
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    for name, buffer in pm.named_buffers():
        if not name.startswith("_sw_"):
            torch.testing.assert_close(buffer, model.get_buffer(name), rtol=1e-12, atol=1e-12)


def test_evaluation_and_training_in_turns():
    model, pm = both(made(Net, 0.0))
    for mode in (True, False, True, True, False, False, True):
        assert pm.train(mode) is pm and pm.training is mode
        equal(pm, model.train(mode))
    pm.eval()
    with torch.no_grad():
        equal(pm, model.eval(), gradients=False)
    with torch.inference_mode():
        equal(pm, model, gradients=False)
    state = pm.random_state()
    pm(**batch())
    assert pm.random_state() == state  # training goes on as if nobody had looked


def test_the_first_evaluation_may_be_in_inference_mode():
    model, pm = both(made(Net, 0.0))
    with torch.inference_mode():
        equal(pm.eval(), model.eval(), gradients=False)
    equal(pm, model)
    equal(pm.train(), model.train())


def test_dropout_is_off_in_evaluation_only():
    model, pm = both(made(Net))
    first, second = pm(**batch()), pm(**batch())
    assert first != second
    model.drop.eval()
    for _ in range(2):  # whose statistics do not depend on dropout
        model(**batch())
    equal(pm.eval(), model.eval())


def test_outputs_may_be_others_in_evaluation():
    model, pm = both(made(Answers, 0.0))
    for mode in (True, False, True):
        equal(pm.train(mode), model.train(mode))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    pm.eval()
    with pytest.raises(ValueError, match="train_step needs a module that returns its loss"):
        pm.train_step(optimizer, batch())


def test_sub_modules_stay_in_the_mode_they_were_planned_in():
    model = made(Net, 0.0)
    model.frozen.eval()
    model, pm = both(model)
    assert pm.training and not pm.frozen.training
    equal(pm, model)
    for mode in (False, True):  # which switches all children, as the module's own does
        equal(pm.train(mode), model.train(mode))
        assert pm.frozen.training is mode
    for one in (pm, model):
        one.frozen.eval()
    equal(pm, model)


def test_a_train_of_the_models_own_is_kept():
    model, pm = both(made(Keeps, 0.0).train())
    for mode in (True, False, True):
        equal(pm.train(mode), model.train(mode))
        assert not pm.frozen.training


class Average(nn.Module):
    """Evaluates with an average of its weights, which training does not read."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 4)
        self.register_buffer("average", torch.ones(4, 6).double())

    def forward(self, x, y):
        weight = self.up.weight if self.training else self.average
        return nn.functional.cross_entropy(x @ weight.T, y)


def test_buffers_that_only_evaluation_reads_are_in_state_dicts():
    model, pm = both(made(Average))
    assert sorted(pm.state_dict()) == sorted(model.state_dict())
    for mode in (False, True):
        equal(pm.train(mode), model.train(mode), gradients=mode)
    model.average.mul_(2)
    pm.load_state_dict(model.state_dict())
    equal(pm.eval(), model.eval(), gradients=False)


def test_a_copy_switches_on_weights_of_its_own():
    model, pm = both(made(Net, 0.0))
    equal(pm.eval(), model.eval())
    twin, copied = copy.deepcopy(pm), copy.deepcopy(model)
    with torch.no_grad():
        for p in (*copied.parameters(), *twin.parameters()):
            p.mul_(0.5)
    equal(pm, model)
    for mode in (False, True, False):
        equal(twin.train(mode), copied.train(mode))
    equal(pm.train(), model.train())


def test_dropout_that_stays_on_in_evaluation_draws():
    model = made(Net).eval()
    model.drop.train()
    _, pm = both(model)
    first, second = pm(**batch()), pm(**batch())
    assert first != second
    model, pm = both(made(Net).eval())
    equal(pm, model)


def test_what_was_planned_in_evaluation_mode_trains():
    model, pm = both(made(Net, 0.0).eval())
    for mode in (False, True, False):
        equal(pm.train(mode), model.train(mode))


def test_modules_kept_whole_and_constants_are_captured_while_there_are_weights():
    model, pm = both(made(Scaling))
    for mode in (True, False, True):
        equal(pm.train(mode), model.train(mode))


@pytest.mark.ranks
def test_two_ranks_switch_as_the_module_does():
    graph, machine = sw.capture(made(Net, 0.0), (), batch()), sw.Machine.preset("2xcpu")
    known = {plan.name: plan for plan in sw.search(graph, machine, "sgd").baselines}
    plans = [known[name] for name in ("data parallel", "fully sharded", "tensor parallel")]
    staged = sw.search(graph, machine, "sgd", stages=(2,))
    plans.append(next(plan for plan in staged if plan.stages == 2))
    answers = sw.search(sw.capture(made(Answers, 0.0), (), batch()), machine, "sgd", stages=(2,))
    refused = plan_to_json(next(plan for plan in answers if plan.stages == 2))
    run_ranks(2, on_ranks, [plan_to_json(plan) for plan in plans], refused)


def refuses(plan):
    """A pipeline has no way to return what is no loss, and its batches are planned calls too."""
    model, optimizer = made(Answers, 0.0), torch.optim.SGD
    pm = sw.parallelize(model, plan)
    with torch.no_grad(), pytest.raises(PlanError, match="cannot run in evaluation mode under"):
        pm.eval()(**batch())
    pm.train()
    parameters = list(pm.parameters()) or [nn.Parameter(torch.zeros(0))]
    for wrong in ({"bogus": batch()["x"]}, {"y": batch()["y"].int()}, {"x": batch()["x"][:3]}):
        with pytest.raises(BatchError):
            pm.train_step(optimizer(parameters, lr=0.1), {**batch(), **wrong})
    torch.testing.assert_close(pm.forward_backward(batch()), model(**batch()).detach())
    with pytest.raises(PlanError, match="has pipeline stages, which return the loss alone"):
        sw.parallelize(made(Both, 0.0), plan, outputs="model")


def on_ranks(texts, refused):
    refuses(sw.Plan.from_json(refused))
    for text in texts:
        plan = sw.Plan.from_json(text)
        model = made(Net, 0.0)
        pm = sw.parallelize(copy.deepcopy(model), plan)
        for mode in (True, False, True):
            pm.train(mode)
            model.train(mode)
            if plan.stages > 1:
                for one in (pm, model):
                    one.zero_grad()
                loss = pm.forward_backward(batch())
                theirs = model(**batch())
                theirs.backward()
                torch.testing.assert_close(loss, theirs.detach(), rtol=1e-12, atol=1e-12)
                for name, p in pm.named_parameters():
                    wanted = model.get_parameter(name).grad
                    got = torch.zeros_like(p) if p.grad is None else p.grad
                    wanted = torch.zeros(()) if wanted is None else wanted
                    got, wanted = whole(got), wanted.expand_as(model.get_parameter(name))
                    got = got.reshape(wanted.shape)
                    torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=1e-11, atol=1e-11)
                with torch.no_grad():
                    pm.eval()
                    torch.testing.assert_close(pm(**batch()), model.eval()(**batch()))
            else:
                equal(pm, model)
