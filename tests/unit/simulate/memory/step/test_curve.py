"""Memory over a step by cause: its highest moment is the peak, made of the same parts."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.simulate.memory.step import curve


@pytest.fixture(scope="module")
def graph():
    layers = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x).square().mean()

    return sw.capture(Layers(), (torch.zeros(64, 512),))


@pytest.mark.parametrize("text", ["dp_replicate=2", "dp_shard=2", "tp=2", "dp_shard=2 mb=2"])
@pytest.mark.parametrize("most", [240, 4])
def test_the_highest_moment_is_the_peak(graph, monkeypatch, text, most):
    monkeypatch.setattr(curve, "_MOST", most)
    plan = sw.price(graph, "2xH100", text)
    held, moments = plan.memory, plan.memory.curve
    assert len(moments) <= most
    lasting = held.parameters + held.optimizer_state + held.batch + held.rounding
    highest = max(moments, key=lambda one: one.total)
    assert highest.total + lasting == plan.peak_bytes
    assert highest.gradients == held.gradients
    beside = highest.saved + highest.gathered + highest.workspace + highest.communication
    assert beside == held.saved + held.workspace + held.communication
    assert any(one.gathered for one in moments) == ("dp_shard" in text)
    assert most == 4 or moments[-1].saved == 0  # few moments are the highest of many
