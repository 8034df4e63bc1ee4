"""Sharded parameters gathered in buckets, one ahead: the same gradients, with fewer collectives."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import profile

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from tests.harness.ranks import run_ranks, whole

pytestmark = pytest.mark.ranks
WIDTH, LAYERS = 363, 4  # a layer is more than the 1 MiB of a bucket in float64, and odd


class Net(nn.Module):
    """Odd sizes, biases that share a bucket, and a parameter that is read twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x.square().mean()


def subject():
    torch.manual_seed(0)
    return Net().double(), {"x": torch.randn(6, WIDTH, dtype=torch.float64)}


class Even(nn.Module):
    """Matrices of more than 1 MiB that halve evenly, one with another value's gradient."""

    def __init__(self, width=364):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.places = nn.Parameter(torch.randn(1, width, width))

    def forward(self, x):
        first, *others = self.layers
        x = first(x) + self.places  # the addition gives both the gradient that it is given
        for layer in others:
            x = torch.tanh(layer(x))
        return x.square().mean()


def even():
    torch.manual_seed(0)
    return Even().double(), {"x": torch.randn(2, 364, 364, dtype=torch.float64)}


def adapted():
    """The same, of which only biases and the scale are trained."""
    model, batch = subject()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    return model, batch


def baselines(model, batch):
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"))
    return {plan.name: plan_to_json(plan) for plan in frontier.baselines}


def test_gathering_in_buckets_equals_one_device():
    known = baselines(*subject())
    few = baselines(*adapted())["fully sharded"]
    run_ranks(2, _compare, [known["ZeRO-2"], known["fully sharded"]], few)


def _compare(texts, few):
    _compare_adapted(few)
    for plan, module, batch, loss, counted in _checked(subject, texts):
        # A bucket for each layer; of what is gathered again, weights alone, two share one.
        regathered = any(p.regathered for p in plan.parameters)
        gathered, scattered = LAYERS + LAYERS // 2 * regathered, LAYERS
        assert counted["send"] == gathered + scattered
        assert counted["all_reduce"] == 1, "the loss"
        with torch.no_grad():
            torch.testing.assert_close(module(**batch), loss, rtol=1e-12, atol=0)


def test_large_copies_that_halve_evenly_travel_alone():
    known = baselines(*even())
    run_ranks(2, _compare_even, [known["ZeRO-2"], known["fully sharded"]])


def _compare_even(texts):
    for plan, _, _, _, counted in _checked(even, texts):
        regathered = sum(p.regathered for p in plan.parameters)
        alone, biases = LAYERS + 1, 1  # all biases share a bucket, and so a message
        gathered, scattered = alone + biases + regathered, alone + biases
        assert counted["send"] == gathered + scattered
        assert counted["all_reduce"] == 1, "the loss"


def _checked(make, texts):
    """Each plan, its module, equal to one device in every way, and the collectives of a step."""
    model, batch = make()
    loss = model(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for text in texts:
        plan = sw.Plan.from_json(text)
        module = sw.parallelize(model, plan)
        _two_steps_in_one(module, batch, loss, expected)
        counted = _collectives(lambda module=module: module(**batch).backward())
        _twice_backward(module, batch, expected)
        _twice_differentiated(module, batch)
        yield plan, module, batch, loss, counted


def _compare_adapted(text):
    """Frozen weights are gathered in buckets of their own, and nothing comes back for them."""
    model, batch = adapted()
    loss = model(**batch)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    module = sw.parallelize(model, sw.Plan.from_json(text))
    module(**batch)  # the first call also compares the batch over ranks
    found = []
    counted = _collectives(lambda: found.append(module(**batch)))
    torch.testing.assert_close(found[0], loss, rtol=1e-12, atol=0)
    assert counted["send"] == LAYERS // 2 + 1, "two weights at a time, and all biases"
    found[0].backward()
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == (name in expected)
        if name in expected:
            grad = whole(parameter.grad).reshape(expected[name].shape)
            torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-14)


def _two_steps_in_one(module, batch, loss, expected):
    """Two calls are alive at once; gradients of both add up."""
    first, second = module(**batch), module(**batch)
    torch.testing.assert_close(first, loss, rtol=1e-12, atol=0)
    (first + second).backward()
    for name, parameter in module.named_parameters():
        found = whole(parameter.grad).reshape(expected[name].shape)
        torch.testing.assert_close(found, 2 * expected[name], rtol=1e-10, atol=1e-14)
        parameter.grad = None


def _twice_backward(module, batch, expected):
    module.zero_grad(set_to_none=True)
    loss = module(**batch)
    loss.backward(retain_graph=True)
    loss.backward()
    for name, parameter in module.named_parameters():
        found = whole(parameter.grad).reshape(expected[name].shape)
        torch.testing.assert_close(found, 2 * expected[name], rtol=1e-10, atol=1e-14)


def _twice_differentiated(module, batch):
    parameters = list(module.parameters())
    grads = torch.autograd.grad(module(**batch), parameters, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    assert all(parameter.grad is not None for parameter in parameters)


def _collectives(call):
    """How often each collective is called, DTensor's included.

    Between two ranks, a gather and a scattered sum are a message each.
    """
    with profile() as seen:
        call()
    names = Counter(event.name for event in seen.events() if event.name.startswith("gloo:"))
    return Counter({name.removeprefix("gloo:"): count for name, count in names.items()})
