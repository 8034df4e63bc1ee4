"""A memory limit below what training holds at least is refused before the search.

Only the commands said it, and only after the capture: `shardwright plan` of a Llama with a limit
below its weights took 13 s, `sw.plan` searched first. They counted gradients and optimizer state
also of parameters that no loss depends on.
"""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import api
from shardwright.ir.frontier import InfeasibleError
from shardwright.planner import planner
from shardwright.planner.tables.memory import state_bytes

X = torch.zeros(4, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(512, 512)  # 1,050,624 bytes
        self.detached = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x).sum() + nn.functional.linear(x, self.detached.weight.detach()).sum()


@pytest.fixture
def unsearched(monkeypatch):
    def search(*given, **named):
        raise AssertionError("searched")

    monkeypatch.setattr(planner, "search", search)


def test_weights_alone_are_told_before_the_capture(unsearched, monkeypatch):
    def capture(*given, **named):
        raise AssertionError("captured")

    monkeypatch.setattr(api, "capture", capture)
    with pytest.raises(InfeasibleError, match=r"^weights alone need 513.3 KiB on each of 2 "):
        sw.plan(Model(), (X,), machine="2xcpu", memory_limit="500KiB")
    with pytest.raises(InfeasibleError, match=r"the limit is 1.0 MiB: raise the limit or take"):
        sw.plan(Model(), (X,), machine=sw.Machine.preset("1xcpu").with_(memory="1MiB"))


def test_state_is_told_before_the_search(unsearched):
    model = nn.Sequential(nn.Linear(512, 512), nn.Flatten(0), _Sum())
    batch = (torch.zeros(4, 512),)
    with pytest.raises(InfeasibleError, match=r"^weights, gradients and optimizer state alone"):
        sw.plan(model, batch, machine="1xcpu", memory_limit="4MiB")
    with pytest.raises(AssertionError, match="searched"):
        sw.plan(model, batch, machine="1xcpu", memory_limit="4MiB", optimizer="sgd")


def test_what_no_loss_depends_on_has_no_gradient():
    graph = sw.capture(Model(), (X,))
    trained = 4 * (8 * 8 + 8)
    weights = 4 * (2 * (8 * 8 + 8) + 512 * 512 + 512)
    assert state_bytes(graph, "adamw") == weights + 3 * trained
    plan = sw.plan(Model(), (X,), machine="1xcpu")
    assert state_bytes(graph, "adamw") <= plan.peak_bytes < weights + 3 * weights


class _Sum(nn.Module):
    def forward(self, x):
        return x.sum()
