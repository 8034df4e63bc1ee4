"""Operators whose rule, or whose form in the graph, was not what torch computes.

PyTorch's own samples of its operators found them (`scripts/coverage_operators.py`); each was
split, or computed otherwise, in silence, or ended with an error of ours.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.rules.analysis import analyze
from shardwright.rules.arguments import localize
from shardwright.tracing.call import CaptureError
from tests.harness.drawn_tensors import f
from tests.harness.graph_comparison import compared
from tests.harness.operator_calls import call
from tests.harness.small_graphs import splittable


class Applied(nn.Module):
    """A function of a linear layer's result, whose elements the loss weights differently."""

    def __init__(self, function, *modules):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.inner = nn.Linear(4, 4), nn.ModuleList(modules)
        self.function = function

    def forward(self, x):
        y = self.function(self.layer(x), *self.inner)
        ramp = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)
        return (y * ramp).sum() / y.numel()


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def splits_of(function, kind, *shape, modules=()):
    """Sizes of the factors along which an operator of this kind may be split."""
    graph = sw.capture(Applied(function, *modules), (numbers(*shape),))
    rules = analyze(graph).rules
    (op,) = (op for op in graph.ops if op.kind == kind)
    sizes = {factor.name: factor.size for factor in rules[op.name].factors}
    return sorted(sizes[name] for name in splittable(rules[op.name]))


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_a_shift_by_padding_is_not_split(mode):
    """RWKV shifts tokens by `ZeroPad2d((0, 0, 1, -1))`: one row more, one less, the same size."""
    amounts = (0, 0, 1, -1) if mode in ("constant", "circular") else (0, 0, 2, -2)

    def shifted(y):
        return F.pad(y.unsqueeze(0), amounts, mode=mode).squeeze(0)

    assert 6 not in splits_of(shifted, "pad", 3, 6, 4)
    assert compared(Applied(shifted), {"x": numbers(3, 6, 4)}).ok


def test_padding_by_nothing_may_be_split():
    assert 6 in splits_of(lambda y: F.pad(y, (1, 1, 0, 0)), "pad", 3, 6, 4)


def test_a_dimension_of_no_elements_is_not_one_of_one():
    def function(y):
        parts = y.split([0, 2, 2], dim=1)
        return torch.cat([*parts, y.new_ones(y.shape[0], 0)], 1) + y.new_ones(5, 0).sum()

    assert compared(Applied(function), {"x": numbers(6, 4)}).ok


def test_adaptive_softmax_with_an_empty_projection():
    torch.manual_seed(0)
    softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [4, 10], div_value=9.0)
    labels = torch.tensor([0, 5, 12, 3, 19, 9])
    model = Applied(lambda y, inner: inner(y, labels).output, softmax)
    assert compared(model, {"x": numbers(6, 4)}).ok


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_updates_its_running_statistics(affine):
    """The operator writes buffers that its schema does not declare."""
    norm = nn.InstanceNorm1d(6, affine=affine, track_running_stats=True)
    model = Applied(lambda y, norm: norm(y) * y, norm)
    assert compared(model, {"x": numbers(3, 6, 4)}).ok
    graph = sw.capture(model, (numbers(3, 6, 4),))
    assert {name for name, _ in graph.updates} == {"inner.0.running_mean", "inner.0.running_var"}


def test_instance_norm_by_its_operator_is_refused():
    """`F.instance_norm` is computed by its formula; who calls the operator itself bypasses that."""
    mean, variance = torch.zeros(6), torch.ones(6)

    def function(y):
        return torch.instance_norm(y, None, None, mean, variance, True, 0.1, 1e-5, False)

    with pytest.raises(CaptureError, match="track_running_stats"):
        sw.capture(Applied(function), (numbers(3, 6, 4),))


@pytest.mark.parametrize("result", range(3))
def test_batch_norm_as_an_operator_gives_what_torch_gives(result):
    """Its third result is of the biased variance, though the running one is unbiased."""

    def function(y):
        return torch.native_batch_norm(y, None, None, None, None, True, 0.1, 1e-5)[result]

    assert compared(Applied(lambda y: function(y) * y), {"x": numbers(6, 4)}).ok


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv1d(6, 6, 3, groups=2), nn.ConvTranspose1d(6, 6, 3, groups=2), nn.Conv1d(6, 4, 3)],
)
def test_convolutions_without_a_batch(convolution):
    model = Applied(lambda y, inner: inner(y), convolution)
    assert compared(model, {"x": numbers(6, 4)}).ok


@pytest.mark.parametrize(
    "one",
    [
        call("conv1d.default", f(6, 11), f(9, 2, 3), f(9), [1], [1], [1], 3),
        call("conv_transpose1d.default", f(6, 11), f(6, 3, 3), f(9), [1], [0], [0], 3),
    ],
    ids=lambda one: one.name,
)
def test_a_convolution_without_batch_dimension_keeps_its_groups(one):
    shapes = [tuple(value.shape) for value in one.values.values()]
    results = [tuple(result.shape) for result in one.results]
    assert localize(one.op, results, shapes, results).args[6] == 3


def test_operators_on_tensors_without_dimensions():
    def function(y):
        total, place = y.sum(), torch.tensor(0)
        reduced = total.sum(0) + total.mean(-1) + total.max(0)[0] + total.amax(0)
        reduced = reduced + total.prod(0) + total.flip(0)
        mixed = total.softmax(0) + total.cumsum(0) + total.logsumexp(0) + total.argmax(0)
        found = total.gather(0, place) + y[0].gather(0, place)
        slope = total.detach()
        return F.prelu(y, slope) + reduced + mixed + found + total.index_select(0, place[None])

    assert compared(Applied(function), {"x": numbers(6, 4)}).ok


@pytest.mark.parametrize(
    "function",
    [
        torch.cov,
        lambda y: y.cov(correction=0, aweights=torch.arange(1.0, 5.0, dtype=y.dtype)),
        lambda y: torch.cov(y, fweights=torch.arange(1, 5)),
        lambda y: torch.cov(y[0]),
        torch.corrcoef,
        lambda y: F.gaussian_nll_loss(y, y * 2, y.square() * 1e-5, reduction="none"),
        lambda y: nn.GaussianNLLLoss(full=True)(y, y * 2, y.square()[:, :1]),
    ],
)
def test_functions_that_look_at_values_only_to_check_them(function):
    """They were refused as decisions on the value of a tensor."""
    assert compared(Applied(function), {"x": numbers(6, 4)}).ok


@pytest.mark.parametrize(
    "function",
    [
        # Its dtype was no argument, and so not widened.
        lambda y: torch.view_as_real(y.chalf()).to(y.dtype),
        # Watched operator by operator, torch itself takes the conjugate for what it is of.
        lambda y: torch.view_as_real(torch.pinverse(torch.complex(y, y.sin()))),
    ],
)
def test_complex_numbers_are_compared_as_the_module_computes_them(function):
    assert compared(Applied(function).double(), {"x": numbers(6, 4).double()}).ok


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_integers_of_all_widths_have_a_size(dtype):
    """The sizes of unsigned ones were not known: a `KeyError` in the search."""
    model = Applied(lambda y: y * y.shape[0] + (y.detach() > 0).to(dtype).double())
    assert compared(model, {"x": numbers(6, 4)}).ok
    assert sw.plan(model, (numbers(6, 4),), machine="1xcpu").devices == 1


def test_a_negative_variance_shows():
    """`F.gaussian_nll_loss` raises; a graph cannot, and says it by NaN."""
    model = Applied(lambda y: F.gaussian_nll_loss(y, y * 2, -y.square()))
    graph = sw.capture(model, (numbers(6, 4),))
    assert graph.outputs
    found = compared(model, {"x": numbers(6, 4)})
    assert "var has negative entry" in found.not_compared


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda y: y.to_sparse().to_dense(), "to_sparse.default does not tell what it gives"),
        (lambda y: y.clone().logical_not_(), "writes into a tensor that requires a gradient"),
        (lambda y: (y * (1 + 2j)).real, r"mul.Tensor: the argument \(1\+2j\) is a complex"),
        (lambda y: torch.istft(torch.complex(y, y), 6, window=torch.ones(6)), "istft.default does"),
        (
            lambda y: torch.linalg.lstsq(y, y[:, :2]).solution,
            "the sizes of what aten.linalg_lstsq.default gives are not known",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_in_one_line(function, message):
    with pytest.raises(CaptureError, match=message) as refused:
        sw.capture(Applied(function), (numbers(6, 4),))
    assert "\n" not in str(refused.value)
