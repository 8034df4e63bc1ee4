"""Batch norms of a whole batch run torch's own kernel, with few operators around it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw

NORMS = (
    nn.BatchNorm2d(6),
    nn.BatchNorm2d(6, affine=False, momentum=0.3),
    nn.BatchNorm2d(6, track_running_stats=False),
)


class Counted(TorchDispatchMode):
    """The names of the operators that run; views and `detach` launch no kernel and do not count."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "profiler" and not func.is_view and "detach" not in str(func):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Sum(nn.Module):
    def forward(self, x):
        return x.square().sum()


class Residual(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(6, 6, 3, padding=1), norm

    def forward(self, x):
        return x + self.norm(self.layer(x)).relu()


class Loss(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 6, 3), norm

    def forward(self, x):
        return self.norm(self.layer(x)).square().sum()


def made(norm, dtype=torch.float64):
    torch.manual_seed(0)
    model = Loss(copy.deepcopy(norm)).to(dtype)
    x = torch.randn(5, 3, 6, 6, dtype=dtype)
    plan = sw.price(sw.capture(model, (x,)), "1xcpu", "mb=1", "sgd")
    return model, sw.parallelize(copy.deepcopy(model), plan), x


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_results_are_those_of_the_module_bit_for_bit(norm, dtype):
    """Also of a second step, whose running statistics are those of the first."""
    model, parallel, x = made(norm, dtype)
    for _ in range(2):
        loss = model(x)
        loss.backward()
        assert torch.equal(parallel.forward_backward((x,)), loss)
    for one, other in zip(model.parameters(), parallel.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for name, buffer in model.named_buffers():
        assert torch.equal(parallel.get_buffer(name), buffer), name


class Siamese(Loss):
    """One norm for two inputs: its statistics change twice in a step."""

    def forward(self, x):
        return (self.norm(self.layer(x)) * self.norm(self.layer(x.flip(0) * 2))).sum()


@pytest.mark.parametrize("whole", [True, False])
def test_a_norm_may_be_called_twice_in_a_step(whole):
    torch.manual_seed(0)
    model, x = Siamese(nn.BatchNorm2d(6)).double(), torch.randn(5, 3, 6, 6, dtype=torch.float64)
    plan = sw.price(sw.capture(model, (x,)), "1xcpu", "mb=1", "sgd")
    parallel = sw.parallelize(copy.deepcopy(model), plan)
    model(x).backward()
    parallel.forward_backward((x,)) if whole else parallel(x).backward()
    for one, other in zip(model.parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-11)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(parallel.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)


def added_operators(norms):
    """How many operators our step has more than the module's own, for so many batch norms."""
    layers = [Residual(copy.deepcopy(NORMS[0])) for _ in range(norms)]
    model, x = nn.Sequential(*layers, Sum()).double(), torch.randn(5, 6, 6, 6).double()
    plan = sw.price(sw.capture(model, (x,)), "1xcpu", "mb=1", "sgd")
    parallel = sw.parallelize(copy.deepcopy(model), plan)
    parallel.forward_backward((x,))
    parallel.zero_grad()
    with Counted() as ours:
        parallel.forward_backward((x,))
    with Counted() as own:
        model(x).backward()
    for counted in (ours, own):
        assert counted.names.count("native_batch_norm") == norms
        assert counted.names.count("native_batch_norm_backward") == norms
    return len(ours.names) - len(own.names)


def test_few_operators_are_added_to_those_of_the_module():
    """The new statistics and the number of batches are made beside the old ones, and copied."""
    assert (added_operators(4) - added_operators(1)) / 3 <= 5


def test_statistics_that_something_else_reads_stay_operators_of_their_own():
    class Reads(Loss):
        def forward(self, x):
            y = self.layer(x)
            out = self.norm(y).square().sum()
            return out + self.norm.running_mean.sum()

    model, parallel, x = made(NORMS[0])
    model = Reads(copy.deepcopy(NORMS[0])).double()
    plan = sw.price(sw.capture(model, (x,)), "1xcpu", "mb=1", "sgd")
    parallel = sw.parallelize(copy.deepcopy(model), plan)
    assert torch.equal(parallel.forward_backward((x,)), model(x))
    assert torch.equal(parallel.get_buffer("norm.running_mean"), model.norm.running_mean)


def test_statistics_are_exact_where_layers_are_recomputed():
    """The backward pass reads old running statistics after the new ones were written."""
    torch.manual_seed(0)
    layers = [Residual(copy.deepcopy(NORMS[0])) for _ in range(3)]
    model, x = nn.Sequential(*layers, Sum()).double(), torch.randn(5, 6, 6, 6).double()
    plan = sw.price(sw.capture(model, (x,)), "1xcpu", "ac=full", "sgd")
    parallel = sw.parallelize(copy.deepcopy(model), plan)
    parallel.forward_backward((x,))
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(parallel.get_buffer(name), buffer)
