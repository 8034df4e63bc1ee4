"""`torch.no_grad` inside a model: the gradients are those of the module."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.tracing.decompose import cached_decompositions

MACHINE = sw.Machine.preset("1xcpu")


class Regions(nn.Module):
    """What `scale` makes of the hidden values weighs them; `last` may work in place."""

    def __init__(self, scale, in_place):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.scale, self.in_place = scale, in_place

    def forward(self, x):
        hidden = self.first(x)
        weight = self.scale(self, hidden)
        result = self.second(hidden)
        result = result.relu_() if self.in_place else result.relu()
        return (result * weight).sum()


def _off(_module, hidden):
    with torch.no_grad():
        return hidden.sigmoid() * 2


def _parameters(module, hidden):
    with torch.no_grad():
        return module.second.weight.sum(0) + hidden


def _on_again(_module, hidden):
    with torch.no_grad():
        frozen = hidden.sigmoid()
        with torch.enable_grad():
            live = hidden.exp() + frozen
        return live, live * frozen


def _both(module, hidden):
    live, frozen = _on_again(module, hidden)
    return live + 3 * frozen


def _twice(module, hidden):
    return _off(module, hidden) + _parameters(module, _off(module, hidden).exp() + hidden)


@pytest.mark.parametrize("in_place", [False, True], ids=["alone", "whole"])
@pytest.mark.parametrize("scale", [_off, _parameters, _both, _twice])
def test_no_gradient_passes_a_region(monkeypatch, scale, in_place):
    monkeypatch.setattr(cached_decompositions, "_WORTH", 0.0)
    torch.manual_seed(0)
    model, (x,) = Regions(scale, in_place).double(), (torch.randn(3, 4, dtype=torch.float64),)
    plan = sw.plan(model, (x,), machine=MACHINE)
    parallel = sw.parallelize(model, plan)
    loss, expected = parallel(x), model(x)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        found = dict(parallel.named_parameters())[name].grad
        torch.testing.assert_close(found.reshape(parameter.shape), parameter.grad, msg=name)


def test_what_a_region_keeps_is_not_kept_for_the_backward_pass():
    graph = sw.capture(Regions(_off, False), (torch.zeros(3, 4),))
    kept = {op.kind: op.saves for op in graph.ops}
    assert kept["sigmoid"] == () and kept["exp" if "exp" in kept else "mul"] != ()
