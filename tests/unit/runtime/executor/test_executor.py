"""Two ranks run a step program and have the gradients of one device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.runtime.executor.executor import ProgramRun
from tests.harness.ranks import run_ranks


class Net(nn.Module):
    """A layer that is called three times, and one of which the loss reads nothing."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.unread = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.down(torch.relu(self.up(x))))
        self.unread(x.detach())
        return x.square().sum()


def differences():
    """Gradients of one device, and of two that share a batch in one and in two micro-batches."""
    torch.manual_seed(0)
    alone, x = Net().double(), torch.randn(8, 4, dtype=torch.float64)
    graph = sw.capture(alone, (x,))
    alone(x).backward()
    found = []
    for count in (1, 2):
        meshes = [Mesh.parse("dp=2")]
        plans = sw.search(graph, "2xcpu", meshes=meshes, micro_batches=(count,))
        model = Net().double()
        model.load_state_dict(alone.state_dict())
        (plan,) = (one for one in plans.baselines if one.name == "fully sharded")
        parallel = sw.parallelize(model, plan)
        parallel(x).backward()
        own = {name: p.grad for name, p in parallel.named_parameters()}
        for name, p in alone.named_parameters():
            mine = None if own[name] is None else own[name].full_tensor()
            found.append((f"{name}, {count}", p.grad, mine))
    return found


@pytest.mark.ranks
def test_gradients_are_those_of_one_device():
    for of_rank in run_ranks(2, differences):
        for name, expected, found in of_rank:
            if expected is None:
                assert found is None or not found.any(), name
            else:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, msg=name)


def test_the_sum_of_gradients_leaves_out_those_that_are_missing():
    values = {"a": torch.ones(2), "b": None, "c": torch.full((2,), 2.0), "d": torch.ones(2)}
    run = SimpleNamespace(values=values)
    assert ProgramRun.sum_of(run, "abcd").tolist() == [4.0, 4.0]
    assert ProgramRun.sum_of(run, "bb") is None
    assert values["a"].tolist() == [1.0, 1.0], "it is another tensor"
