"""Backward passes of several regions in one call of autograd."""

import dataclasses

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.program.step.instructions import Backward
from shardwright.runtime.executor.executor import StepExecutor
from shardwright.runtime.regions.connected_passes import connected_passes
from tests.harness.ranks import run_ranks


class Net(nn.Module):
    """Layers in several buckets, with a value that skips some, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))
        self.unread = nn.Linear(128, 128)

    def forward(self, x):
        kept = first = torch.tanh(self.layers[0](x))
        for number, layer in enumerate(self.layers[1:]):
            x = torch.relu(layer(first)) + (kept if number in (1, 4) else first)
            first = x
        # Zeros, whose gradient is missing.
        aside = self.unread(x.detach()).detach()
        return first.square().mean() + aside.sum() * 0


def played():
    """Gradients of one device and of two ranks; what ran, programs, and chains of passes."""
    torch.manual_seed(0)
    alone, x = Net().double(), torch.randn(8, 128, dtype=torch.float64)
    model = Net().double()
    model.load_state_dict(alone.state_dict())
    graph = sw.capture(model, (x,))
    plans = sw.search(graph, sw.Machine.preset("2xcpu"))
    (plan,) = (one for one in plans.baselines if one.name == "data parallel")
    parallel = sw.parallelize(model, plan)
    found, begin = [], StepExecutor.begin

    def begun(self, given, state, trace=None):
        trace = []
        found.append((self, trace))
        return begin(self, given, state, trace)

    StepExecutor.begin = begun
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    serial = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    try:
        for _ in range(2):
            serial.zero_grad()
            loss = alone(x)
            loss.backward()
            serial.step()
            losses.append((loss.item(), parallel.train_step(optimizer, (x,)).item()))
        retained = parallel(x)
        for _ in range(2):  # of which the second one runs again
            parallel.zero_grad()
            retained.backward(retain_graph=True)
        serial.zero_grad()
        alone(x).backward()
    finally:
        StepExecutor.begin = begin
    own = dict(parallel.named_parameters())
    values = [
        (name, p.detach(), own[name].full_tensor().detach(), p.grad, own[name].grad)
        for name, p in alone.named_parameters()
    ]
    values = [(*four, None if g is None else g.full_tensor()) for *four, g in values]
    ran = [(trace, executor.program) for executor, trace in found]
    chains = [len({one.passes for one in e.places.values()}) for e, _ in found]
    members = [len(e.places) for e, _ in found]
    return losses, values, ran, chains, members


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(2, played)


@pytest.mark.ranks
def test_steps_are_those_of_one_device_and_run_what_is_printed(of_ranks):
    for losses, values, ran, chains, members in of_ranks:
        for expected, found in losses:
            assert found == pytest.approx(expected, rel=1e-12)
        for name, weight, ours, gradient, our_gradient in values:
            torch.testing.assert_close(ours, weight, rtol=1e-12, atol=1e-14, msg=name)
            if gradient is None:
                assert our_gradient is None or not our_gradient.any(), name
            else:
                torch.testing.assert_close(our_gradient, gradient, rtol=1e-12, atol=1e-14)
        assert len(ran) == 4
        for trace, program in ran:
            assert tuple(trace) == program.instructions
        assert chains == [1] * 4
        assert min(members) > 2


@pytest.mark.ranks
def test_chains_end_where_a_run_may_end_and_where_others_read_a_gradient(of_ranks):
    program = of_ranks[0][2][0][1]
    (chain,) = connected_passes(program, ())
    first, *others = (one for one in program.instructions if isinstance(one, Backward))
    assert chain == tuple(others)
    assert "" in first.made, "a gradient that autograd would make, and nobody reads"
    at = program.instructions.index(chain[2])
    assert connected_passes(program, {at}) == (chain[:2],)  # and one by itself
    # One more reader of the gradient that the third pass takes.
    given = chain[2].given[0][0]
    other = dataclasses.replace(program, gradients=(*program.gradients, ("x", given)))
    assert connected_passes(other, ()) == (chain[:2],)
