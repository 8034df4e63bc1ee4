"""Batch norm as sums and a normalisation equals torch's, buffers and gradients included."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.tracing.capture import capture_call
from shardwright.tracing.export import kernels
from tests.zoo.subject import Subject, worst


class Normed(nn.Module):
    def __init__(self, norm, layer=None):
        super().__init__()
        self.layer = layer or nn.Conv2d(3, 4, 3)
        self.norm = norm

    def forward(self, x):
        return self.norm(self.layer(x)).square().sin().sum()


def _differ(model, x):
    """The worst error of the captured graph against the module, in training or eval mode."""
    one = Subject(model.double(), {"x": x.double()})
    alone = copy.deepcopy(model)
    loss = alone(**one.batch)
    loss.backward()
    expected = {"loss": loss.detach()}
    expected |= {f"gradient of {key}": p.grad for key, p in alone.named_parameters()}
    expected |= {f"buffer {key}": alone.get_buffer(key) for key, _ in one.graph.updates}
    found = one.run(one.one_device())
    return worst(expected, {key: found[key] for key in expected})[0], one.graph


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=0.3, eps=1e-2),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4, affine=True),
        nn.GroupNorm(2, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_norm_equals_torch(norm, training):
    torch.manual_seed(0)
    model = Normed(copy.deepcopy(norm)).train(training)
    for _ in range(2):  # buffers that are not what they started as
        model(torch.randn(5, 3, 6, 6))
    error, _ = _differ(model, torch.randn(5, 3, 6, 6))
    assert error < 1e-9  # of a gradient that is zero but for rounding


def test_buffers_are_updated_with_the_unbiased_variance():
    model = Normed(nn.BatchNorm1d(4), nn.Linear(3, 4))
    error, graph = _differ(model, torch.randn(5, 3))
    assert error < 1e-9  # of a gradient that is zero but for rounding
    assert [key for key, _ in graph.updates] == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


@pytest.mark.parametrize("far", [1e4, 1e6])
def test_statistics_keep_their_digits_far_from_zero(far):
    """Also those that are brought together from parts, whose squares dwarf their variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, generator=generator) * far / 1e4 + far
    parts = [kernels.moments(part, 1.0 / 64) for part in x.split([1, 40, 0, 23])]
    expected = x.double().var(0)
    for moments in (kernels.moments(x, 1.0 / 64), sum(parts)):
        mean, variance = kernels.statistics(moments, 64, torch.float64)
        torch.testing.assert_close(mean, x.double().mean(0), rtol=1e-7, atol=0.0)
        torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0.0)


def test_half_precision_keeps_statistics_in_more():
    model = Normed(nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3).bfloat16())
    with torch.device("meta"):
        x = torch.empty(5, 3, 6, 6, dtype=torch.bfloat16)
    graph = capture_call(model.to("meta"), (x,)).graph
    (op,) = (op for op in graph.ops if op.kind == "standardize")
    kinds = [graph.tensor[name].dtype for name in (*op.operands, *op.outputs)]
    assert kinds == ["bfloat16", "float64", "float32", "float32", "bfloat16"]


def test_half_precision_trains():
    """What a batch norm of bfloat16 does by torch's own kernel, to the digits that it has."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 5).bfloat16().requires_grad_()
    weight, bias = torch.randn(2, 4).requires_grad_().unbind()
    found = kernels.standardize(x, kernels.moments(x, 1.0 / 30), weight, bias, 1e-5)
    expected = F.batch_norm(x, None, None, weight, bias, training=True)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(6, 4, 5).bfloat16()
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight, bias), grad),
        torch.autograd.grad(expected, (x, weight, bias), grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_autograd_keeps_the_input_once():
    with torch.device("meta"):
        graph = capture_call(Normed(nn.BatchNorm2d(4)), (torch.empty(5, 3, 6, 6),)).graph
    kept = {op.kind: op.saves for op in graph.ops if op.kind in ("moments", "standardize")}
    (convolution,) = (op for op in graph.ops if op.kind == "conv2d")
    large = {name for saves in kept.values() for name in saves if graph.tensor[name].bytes > 1000}
    assert large == set(convolution.outputs)


@pytest.mark.parametrize("affine", [True, False])
def test_kernels_have_right_gradients(affine):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    mean, weight, bias = torch.randn(3, 3, dtype=torch.float64).unbind()
    variance = torch.rand(3, dtype=torch.float64)
    moments = torch.stack([mean, variance + mean.square()]).requires_grad_()
    affinity = (weight.requires_grad_(), bias.requires_grad_()) if affine else (None, None)
    assert torch.autograd.gradcheck(kernels.moments, (x, 0.5))
    assert torch.autograd.gradcheck(kernels.normalize, (x, mean, variance, *affinity, 1e-3))
    assert torch.autograd.gradcheck(kernels.standardize, (x, moments, *affinity, 1e-3))
    expected = F.batch_norm(x, mean, variance, *affinity, eps=1e-3)
    torch.testing.assert_close(kernels.normalize(x, mean, variance, *affinity, 1e-3), expected)
    torch.testing.assert_close(kernels.standardize(x, moments, *affinity, 1e-3), expected)


def laid_out(x, order):
    """`x` with its elements in memory in this order of dimensions."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (1, 3, 1, 4), (2, 3, 4, 1), (2, 3, 4, 4)])
def test_gradients_do_not_depend_on_layouts_in_memory(shape):
    """A rank with one sample got wrong gradients where these were in another layout than values."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape).double()
    weight, bias = torch.randn(2, shape[1]).double()
    found = []
    for of_x, of_grad in itertools.product(itertools.permutations(range(4)), repeat=2):
        leaf = laid_out(x, of_x).detach().requires_grad_()
        moments = kernels.moments(leaf, shape[1] / x.numel())
        kernels.standardize(leaf, moments, weight, bias, 1e-5).backward(laid_out(grad, of_grad))
        found.append(leaf.grad)
    for one in found[1:]:
        torch.testing.assert_close(one, found[0])
