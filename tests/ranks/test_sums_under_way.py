"""Single numbers are summed on the way: of labels while the layers compute, also after a step that
failed, of the loss along with gradients.
"""

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.program.step.instructions import Transfer, Wait
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.ranks


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x, labels):
        scores = self.head(torch.relu(self.first(x)))
        return nn.functional.cross_entropy(scores, labels)


def _example():
    torch.manual_seed(0)
    labels = torch.tensor([1, 2, -100, 3, 0, -100, -100, 1])  # three count on one rank, two fail
    return Tagger().double(), {"x": torch.randn(8, 6, dtype=torch.float64), "labels": labels}


class StopError(Exception):
    """A step that fails on every rank."""


def _stop(*_):
    raise StopError


def _step(text):
    model, batch = _example()
    expected = copy.deepcopy(model)
    loss = expected(**batch)
    loss.backward()
    module = sw.parallelize(model, sw.Plan.from_json(text))
    running = module._sw_program
    instructions = running.program.instructions
    sums = {one.handle for one in running.program.transfers() if one.parts[0].shape == ()}
    begun = next(i for i, one in enumerate(instructions) if isinstance(one, Transfer))
    waited = next(i for i, one in enumerate(instructions) if isinstance(one, Wait))
    assert instructions[begun].handle == instructions[waited].handle and sums
    between = [op for one in instructions[begun:waited] for op in getattr(one, "ops", ())]
    assert sum("linear" in op or "addmm" in op for op in between) == 2, between

    last = running.regions.parts[instructions[waited + 1].region]
    hook = last.register_forward_pre_hook(_stop)
    with pytest.raises(StopError):
        module.forward_backward(batch)
    hook.remove()
    module.recover()
    module.zero_grad()
    for found in (module.forward_backward(batch), module(**batch)):
        torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in expected.named_parameters():
        gradient = module.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)


def test_labels_are_counted_while_layers_compute():
    model, batch = _example()
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"))
    plan = {plan.name: plan for plan in frontier.baselines}["data parallel"]
    run_ranks(2, _step, plan_to_json(plan))


class Scaled(nn.Module):
    """One parameter, whose gradient is summed where it is, with no room for others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return (x * self.scale).square().mean()


def _scaled():
    return Scaled(), {"x": torch.arange(48.0, dtype=torch.float64).view(8, 6)}


def _messages(make, text, compiled):
    """How many elements each sum of a step has, and the gradients of a step with a broken one."""
    model, batch = make()
    expected = copy.deepcopy(model)
    loss = expected(**batch)
    loss.backward()
    module = sw.parallelize(model, sw.Plan.from_json(text))
    if compiled:
        module.compile_programs()
    module.forward_backward(batch)  # the first batch is compared over the ranks
    module.zero_grad()
    sent, send = [], dist.all_reduce

    def summed(x, *args, **kwargs):
        sent.append(x.numel())
        return send(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist, "all_reduce", summed)
        found = module.forward_backward(batch)
        alone, sent[:] = list(sent), []
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        module.zero_grad()
        hook = module._sw_program.register_forward_hook(_stop)  # before anything rides
        with pytest.raises(StopError):
            module.forward_backward(batch)
        hook.remove()
        sent.clear()
        torch.testing.assert_close(
            module.forward_backward(batch), loss.detach(), rtol=1e-12, atol=0
        )
    assert sent == alone
    for name, parameter in expected.named_parameters():
        gradient = module.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)
    return alone


has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not has_compiler, reason="no C++ compiler")),
    ],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize(
    "make, messages",
    [
        # Labels, then all four gradients and the loss.
        pytest.param(_example, [1, 10 * 6 + 10 + 4 * 10 + 4 + 1], id="rides"),
        pytest.param(_scaled, [1, 6], id="alone"),
    ],
)
def test_the_loss_rides_with_gradients_where_some_are_summed_together(make, messages, compiled):
    model, batch = make()
    frontier = sw.search(sw.capture(model, (), batch), sw.Machine.preset("2xcpu"))
    plan = {plan.name: plan for plan in frontier.baselines}["data parallel"]
    assert run_ranks(2, _messages, make, plan_to_json(plan), compiled) == [messages] * 2
