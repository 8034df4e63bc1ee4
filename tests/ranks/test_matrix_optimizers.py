"""Optimizers that compute with whole matrices train sharded parameters as on one device."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.runtime.parameters.matrix_optimizer import ByShape
from tests.harness.ranks import run_ranks, whole
from tests.harness.shampoo import SHAMPOO, Shampoo
from tests.ranks.test_random_tilings import error

STRATEGIES = ("dp_shard=2", "tp=2 mb=2", "dp_replicate=2 zero=0")
OPTIMIZERS = {
    "muon": (
        "muon",
        partial(ByShape, partial(torch.optim.Muon, lr=0.1), partial(torch.optim.AdamW, lr=0.1)),
    ),
    "shampoo": (SHAMPOO, Shampoo),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), y)


def subject():
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6).double(), "y": torch.randn(8, 4).double()}
    return Net().double(), batch


def states(optimizer):
    """Bytes of the state of parameters on this rank, without numbers of steps."""
    parts = optimizer.parts if isinstance(optimizer, ByShape) else (optimizer,)
    tensors = (x for part in parts for one in part.state.values() for x in one.values())
    local = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
    return sum(x.nbytes for x in local if x.numel() > 1)


def trained(plans):
    for (name, text), plan in plans.items():
        model, batch = subject()
        serial, make = copy.deepcopy(model), OPTIMIZERS[name][1]
        module = sw.parallelize(model, plan)
        alone, together = make(serial.parameters()), make(module.parameters())
        for _ in range(3):
            alone.zero_grad()
            loss = serial(**batch)
            loss.backward()
            alone.step()
            assert error(loss.detach(), module.train_step(together, batch)) < 1e-9, (name, text)
        for key, parameter in module.named_parameters():
            expected = serial.get_parameter(key).detach()
            assert error(expected, whole(parameter.detach())) < 1e-9, (name, text, key)
        assert states(together) == plan.memory.optimizer_state, (name, text)


@pytest.mark.ranks
def test_matrices_are_updated_whole_whatever_their_layout():
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = {
        (name, text): sw.price(graph, "2xcpu", text, given)
        for name, (given, _) in OPTIMIZERS.items()
        for text in STRATEGIES
    }
    run_ranks(2, trained, plans)
    plain = sw.price(graph, "2xcpu", "dp_shard=2", "adamw")
    seconds = {
        (name, p.name): p.seconds
        for name in ("muon", "shampoo")
        for p in plans[name, "dp_shard=2"].parameters
    }
    for p in plain.parameters:
        for name in ("muon", "shampoo"):
            dearer = seconds[name, p.name] > p.seconds
            assert dearer == (p.name.endswith("weight")), (name, p.name)
    report = sw.verify(model, plans["muon", "tp=2 mb=2"], (), batch)
    assert report.ok, report
