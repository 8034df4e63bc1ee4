"""`verify` compared a plan with the captured graph, and the graph with the module's loss alone.

A user trained a quantised model whose rounding had a straight-through estimator. Capture lost its
backward pass, and `verify` said "equals, 0.0": both sides ran the same wrong graph, and of the
module itself only the loss was looked at, in evaluation mode, and not at all if it had dropout or
batch norm. Now the module is run eagerly in float64, with the random numbers of the plan, and
every output, gradient and buffer of it is compared; what cannot be compared is not "ok".
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import shardwright as sw
from shardwright.runtime.verify import verify as verify_module
from shardwright.runtime.verify.module_comparison import error
from tests.harness.graph_comparison import compared
from tests.zoo.subject import ZOO


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Two layers read the output of a first one; `detached` keeps the second's gradient away."""

    def __init__(self, *, detached=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = (nn.Linear(6, 6) for _ in range(3))
        self.detached = detached

    def forward(self, x):
        stem = self.stem(x).tanh()
        other = stem.detach() if self.detached else stem
        return (self.left(stem) * self.right(other)).square().mean()


def test_a_falsified_gradient_is_found_beside_an_equal_loss():
    """Only the backward pass differs: the loss is the same to the last bit."""
    found = compared(Branches(), {"x": numbers(5, 6)}, graph_of=Branches(detached=True))
    assert not found.ok
    assert found.error > 1e-3
    assert found.worst.startswith("stem.")
    assert found.dtype == "float64"


@pytest.mark.ranks
def test_verify_reports_a_falsified_gradient(monkeypatch):
    model, batch = Branches(), {"x": numbers(6, 6)}
    capture = verify_module.capture_with_rules
    falsified = Branches(detached=True)
    plan = sw.plan(falsified, (), batch, machine=sw.Machine.preset("2xcpu"))
    monkeypatch.setattr(
        verify_module, "capture_with_rules", lambda _, *call: capture(falsified, *call)
    )
    report = sw.verify(model, plan, (), batch)
    assert not report.ok
    assert report.loss_error < 1e-12
    assert report.max_gradient_error > 1e-3
    assert report.capture_error > 1e-3
    assert report.worst.tensor.startswith("stem.")
    assert "DIFFERS from one device" in str(report)


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, x):
        return self.norm(self.layer(x)).square().mean() * 0.5


def test_a_buffer_with_other_contents_is_found():
    found = compared(Normed(), {"x": numbers(5, 4)}, graph_of=Normed(momentum=0.3))
    assert not found.ok
    assert found.worst in ("norm.running_mean", "norm.running_var")


class Draws(nn.Module):
    """Random numbers of many kinds, each of which the module draws by operators of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.recurrent = nn.LSTM(4, 4, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        y = self.layer(x) + torch.randn(5, 5, 4) * torch.rand_like(x)
        y = F.gumbel_softmax(F.alpha_dropout(y, 0.3, True))
        y = F.dropout1d(self.recurrent(F.dropout(y, 0.2))[0], 0.5, True)
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.3)
        y = y * torch.bernoulli(torch.full_like(y, 0.4)) * torch.randint(0, 5, (5, 5, 4))
        return y.sum() + torch.empty(5).uniform_(-1, 1).sum()


def test_a_module_that_draws_random_numbers_draws_those_of_the_graph():
    assert compared(Draws(), {"x": numbers(5, 5, 4)}).ok


class OtherRate(nn.Module):
    def __init__(self, rate):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.rate = nn.Linear(4, 4), rate

    def forward(self, x):
        return F.dropout(self.layer(x), self.rate).sum()


def test_what_cannot_be_compared_is_not_ok():
    found = compared(OtherRate(0.3), {"x": numbers(5, 4)}, graph_of=OtherRate(0.5))
    assert not found.ok
    assert found.error == float("inf")
    assert "probability 0.3, its captured graph with 0.5" in found.not_compared


@pytest.mark.ranks
def test_a_report_says_loudly_that_the_module_was_not_compared():
    model, batch = OtherRate(0.5), {"x": numbers(6, 4)}
    plan = sw.plan(model, (), batch, machine=sw.Machine.preset("2xcpu"))
    model.register_forward_pre_hook(lambda module, given: setattr(module, "rate", 0.3))
    with pytest.MonkeyPatch.context() as patch:
        capture, planned = verify_module.capture_with_rules, OtherRate(0.5)
        patch.setattr(verify_module, "capture_with_rules", lambda _, *call: capture(planned, *call))
        report = sw.verify(model, plan, (), batch)
    assert not report.ok
    assert report.capture_error == float("inf")
    assert "the module itself was NOT COMPARED with its captured graph" in str(report)
    assert report.max_gradient_error < 1e-9, "the plan equals its graph, and that is said too"


class Narrow(Normed):
    def forward(self, x):
        if x.dtype is not torch.float32:
            raise TypeError("this module takes float32 alone")
        return super().forward(x)


def test_a_module_that_float64_is_not_for_is_compared_in_its_own_precision():
    found = compared(Narrow(), {"x": numbers(5, 4)})
    assert found.ok
    assert found.dtype == "float32"
    assert "this module takes float32 alone" in found.notes[0]
    other = compared(Narrow(), {"x": numbers(5, 4)}, graph_of=Narrow(momentum=0.3))
    assert not other.ok


@pytest.mark.hf
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "t5"])
def test_models_with_dropout_and_experts_are_compared_in_float64(name):
    found = compared(*ZOO[name]())
    assert found.ok, found
    assert found.dtype == "float64"


def test_errors_of_numbers_that_are_not_finite():
    """A NaN that only one side has is a difference; the same infinity on both is none."""
    inf, nan = float("inf"), float("nan")
    assert error(torch.tensor([1.0, inf]), torch.tensor([1.0, inf])) == 0.0
    assert error(torch.tensor([1.0, nan]), torch.tensor([1.0, nan])) == 0.0
    assert error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, nan])) == inf
    assert error(torch.tensor([1.0, inf]), torch.tensor([1.0, 2.0])) == inf
    assert error(torch.tensor([3]), torch.tensor([4])) == inf
    assert error(None, torch.tensor([0.0])) == inf


def test_ranks_import_the_library_that_registers_an_operator():
    """The grouped product of transformers is an operator where its file is imported."""
    config = MixtralConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    ids = torch.randint(19, (4, 5))
    batch = {"input_ids": ids, "labels": ids}
    model = MixtralForCausalLM(config)
    plan = sw.price(sw.capture(model, (), batch), "2xcpu", "dp_shard=2 ep=2")
    assert sw.verify(model, plan, (), batch).max_gradient_error < 1e-12
