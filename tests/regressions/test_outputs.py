"""`sw.parallelize(..., outputs="model")` returns what the model returned.

A user who needed the logits beside the loss got the loss alone from `pm(**batch)`, and `.logits`
was an attribute error. And a Hugging Face model planned without `labels` made a plan of a step
without a loss, in which the module returned a plain dict: nobody had said so.
"""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.tracing.call import CaptureError
from tests.harness.models import double, gpt2
from tests.harness.ranks import run_ranks, whole

ONE = sw.Machine.preset("1xcpu")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Found:
    loss: Any
    pair: Any
    extras: Any


class Cache:
    """A plain object that holds tensors, as caches of keys and values do."""

    def __init__(self, layers, device):
        self.layers, self.device, self.name = layers, device, "cache"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)

    def forward(self, x, y):
        hidden = torch.relu(self.norm(self.up(x)))
        logits = self.down(hidden)
        extras = {"none": None, "number": len(x), "text": "t", "flags": [True, x > 0], "y": y}
        extras["cache"] = Cache([hidden.detach(), logits * 2], x.device)
        return Found(nn.functional.cross_entropy(logits, y), Pair(logits, (hidden.sum(0),)), extras)


def net():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    return Net().double(), {"x": x, "y": torch.randint(4, (6,), generator=generator)}


def same(ours, theirs, path=""):
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m: path + m)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key in theirs:
            same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{path}.{i}")
    elif hasattr(theirs, "__dict__"):
        same(dict(vars(ours)), dict(vars(theirs)), path)
    else:
        assert ours == theirs, path


def gradients_are_the_same(pm, model, batch, loss_of):
    for one in (pm, model):
        one.zero_grad()
        loss_of(one(**batch)).backward()
    for name, p in pm.named_parameters():
        wanted = model.get_parameter(name).grad
        torch.testing.assert_close(
            whole(p.grad).reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-10
        )


def mixed(returned):
    return (
        returned.loss
        + returned.pair.left.square().mean()
        + returned.extras["cache"].layers[1].sum()
    )


def check(plan, make=net, loss_of=mixed):
    model, batch = make()
    pm = sw.parallelize(copy.deepcopy(model), plan, outputs="model")
    same(pm(**batch), model(**batch))
    gradients_are_the_same(pm, model, batch, lambda returned: returned.loss)
    gradients_are_the_same(pm, model, batch, loss_of)
    with torch.no_grad():
        same(pm.eval()(**batch), model.eval()(**batch))
    same(pm.train()(**batch), model.train()(**batch))
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.0)
    torch.testing.assert_close(pm.train_step(optimizer, batch), model(**batch).loss.detach())


def test_every_entry_comes_back_as_it_was():
    model, batch = net()
    check(sw.plan(model, (), batch, machine=ONE))


def test_the_loss_is_the_default_and_other_words_are_refused():
    model, batch = net()
    plan = sw.plan(model, (), batch, machine=ONE)
    assert sw.parallelize(model, plan)(**batch).dim() == 0
    with pytest.raises(PlanError, match="outputs is 'logits'; choose 'loss', or 'model'"):
        sw.parallelize(model, plan, outputs="logits")


def test_micro_batches_return_the_loss_alone():
    make = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make

        def forward(self, x, y):
            logits = self.body(x)
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}

    _, batch = net()
    model = Loss().double()
    plan = sw.plan(model, (), batch, machine=ONE, micro_batches=(2,))
    with pytest.raises(PlanError, match="the plan has micro-batches, which return the loss alone"):
        sw.parallelize(model, plan, outputs="model")


def gpt():
    model, batch = double(*gpt2(dropout=0.0))
    return model, batch


def on_logits(returned):
    return returned.loss + returned.logits.square().mean()


@pytest.mark.hf
def test_a_hugging_face_output_has_its_logits_and_its_cache():
    model, batch = gpt()
    plan = sw.plan(model, (), batch, machine=ONE)
    check(plan, gpt, on_logits)


@pytest.mark.hf
def test_a_model_without_labels_is_an_error_unless_the_loss_is_outside():
    model, batch = gpt()
    ids = {"input_ids": batch["input_ids"]}
    for find in (sw.capture, lambda *a: sw.plan(*a, machine=ONE)):
        with pytest.raises(CaptureError, match=r"returns no loss.*labels.*loss='outside'"):
            find(model, (), ids)
    plan = sw.plan(model, (), ids, machine=ONE, loss="outside")
    pm = sw.parallelize(copy.deepcopy(model), plan, outputs="model")
    gradients_are_the_same(pm, model, ids, lambda returned: returned.logits.square().mean())
    with pytest.raises(CaptureError, match="loss is 'somewhere'; choose 'model' or 'outside'"):
        sw.capture(model, (), batch, loss="somewhere")


@pytest.mark.ranks
def test_two_ranks_return_whole_outputs_of_the_global_batch():
    graph = sw.capture(*((lambda model, batch: (model, (), batch))(*net())))
    found = {p.name: p for p in sw.search(graph, sw.Machine.preset("2xcpu"), "sgd").baselines}
    names = ("data parallel", "fully sharded", "tensor parallel")
    run_ranks(2, on_ranks, [plan_to_json(found[name]) for name in names])


def on_ranks(texts):
    for text in texts:
        check(sw.Plan.from_json(text))
