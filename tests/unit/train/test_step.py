"""What a step asks of the host: one read of each loss, before the update, and none that waits."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.runtime.device import HostScalar
from shardwright.runtime.shape_variants import ShapeVariants
from shardwright.train.step import NonFiniteLossError, Stepper
from tests.unit.train.test_loop import Serial, job, start


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.drop(self.layer(x))).square().mean()


def variants(strategy="mb=1"):
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(4, 6)}
    plan = sw.price(sw.capture(model, (), batch), "1xcpu", strategy, "sgd")
    return ShapeVariants(model, plan, ()), batch


class Reads(TorchDispatchMode):
    """Counts reads of tensors on the host; `tolist` is patched, because it dispatches nothing."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.found = []
        was = torch.Tensor.tolist
        monkeypatch.setattr(
            torch.Tensor, "tolist", lambda x: (self.found.append("tolist"), was(x))[1]
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.found.append("item")
        return func(*args, **(kwargs or {}))


def test_a_step_reads_the_loss_and_the_norm_and_nothing_else(monkeypatch):
    """The state of random numbers was read three times, each of which waited for the device."""
    module, batch = variants()
    run = start(module, job())
    for clip, reads in ((None, 1), (1.0, 2)):
        stepper = Stepper.of(module, clip)
        stepper(run, [batch])
        with Reads(monkeypatch) as host:
            stepper(run, [batch])
        assert host.found == ["item"] * reads


@pytest.mark.parametrize("strategy", ["mb=1", "mb=2"])
def test_the_loss_is_passed_on_before_the_backward_pass(strategy):
    module, batch = variants(strategy)
    seen = []
    loss = module.forward_backward(
        batch, lambda x: seen.append((x.item(), all(p.grad is None for p in module.parameters())))
    )
    assert seen == [(loss.item(), True)]


def test_a_random_state_is_that_of_a_step_after_later_ones():
    module, batch = variants()
    before, first = module.random_tensor(), module.random_state()
    module.forward_backward(batch)
    assert tuple(before.tolist()) == first != module.random_state()


class Poisoned(Serial):
    """Its second step has gradients that are not finite, and a finite loss."""

    calls = 0

    def forward_backward(self, batch, on_loss=None, scaler=None):
        loss = super().forward_backward(batch, on_loss)
        self.calls += 1
        if self.calls == 2:
            self.layer.weight.grad.fill_(math.inf)
        return loss


def test_norms_that_are_read_a_step_later_stop_the_run_then():
    """As on a GPU: results come one step late, and weights have the update of the bad step."""
    module, batch = Poisoned(), {"x": torch.ones(2, 3)}
    run = start(module, job())
    stepper = Stepper.of(module, 1.0)
    stepper.lag = 1
    assert stepper(run, [batch]) == []
    (first,) = stepper(run, [batch])
    assert first.step == 1 and math.isfinite(first.gradient_norm)
    wrong = r"the gradients of step 2 have the norm inf, .* go on from the last checkpoint"
    late = copy.copy(stepper)
    with pytest.raises(NonFiniteLossError, match=wrong):
        late.drain(run)  # before a checkpoint is written
    with pytest.raises(NonFiniteLossError, match=wrong):
        stepper(run, [batch])
    assert run.step == 2


def test_a_scalar_on_the_host_is_what_it_was_copied_from():
    assert HostScalar(torch.tensor(0.1, dtype=torch.float64)).value() == 0.1
