"""A limit that a model just meets was refused: weights without a gradient were charged for one.

A user's model had a projection of which only a detached result was used, as in a monitor or a
frozen teacher. No gradient reaches its weight, so the optimizer keeps no state for it, and the
simulated memory of a plan says so. The search's tables counted gradient and state nevertheless,
so `recompute`, micro-batches and sharding were chosen to save what nobody holds.
"""

import torch
from torch import nn

import shardwright as sw
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.tables.memory import state_bytes

WIDTH = 256


class Monitored(nn.Module):
    """A model with a large projection that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.monitor = nn.Linear(8, WIDTH)

    def forward(self, x):
        y = self.used(x)
        seen = self.monitor(y).detach().mean()
        return (y * y).mean() + 0 * seen


def test_a_parameter_that_no_loss_depends_on_costs_its_weight_alone():
    graph = sw.capture(Monitored(), (torch.randn(16, 8),))
    leaf = next(x for x in graph.leaves_of(LeafKind.PARAMETER) if x.name == "monitor.weight")
    assert graph.tensor[leaf.name].requires_grad and leaf.name not in graph.trained
    assert "used.weight" in graph.trained
    machine = sw.Machine.preset("2xH100")
    space, _ = SpaceFactory(graph, recompute=True).space(machine, Mesh.parse("dp=2"), "adamw", 1)
    whole = space.stored[[x.name for x in space.parameters].index(leaf.name)]
    table = space.model.parameter(leaf, whole.codes[:1])
    assert table.bytes.tolist() == [8 * WIDTH * 4]


def test_a_limit_that_such_a_model_just_meets_is_accepted():
    model, batch = Monitored(), (torch.randn(16, 8),)
    graph = sw.capture(model, batch)
    machine = sw.Machine.preset("2xH100")
    plan = sw.search(graph, machine, recompute=False).fastest()
    assert plan.peak_bytes < 4 * state_bytes(graph, "adamw")
    limit = plan.peak_bytes
    found = sw.plan(model, batch, machine=machine, memory_limit=int(limit), micro_batches=[1])
    assert found.peak_bytes <= limit
    state = sum(parameter.bytes for parameter in found.parameters)
    assert state <= state_bytes(graph, "adamw")
