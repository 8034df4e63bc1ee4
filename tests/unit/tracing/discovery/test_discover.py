"""A user's operator without registration, a stated rule, and the memory of findings."""

import json

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.rules import user_rules
from shardwright.rules.analysis import analyze
from shardwright.tracing.discovery import discover


@torch.library.custom_op("shardwright_tests::scaled_mm", mutates_args=())
def scaled_mm(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ w) * scale


@scaled_mm.register_fake
def _(x, w, scale):
    return x.new_empty(x.shape[0], w.shape[1])


def _backward(ctx, grad):
    x, w = ctx.saved_tensors
    return grad @ w.t() * ctx.scale, x.t() @ grad * ctx.scale, None


def _setup(ctx, inputs, output):
    x, w, ctx.scale = inputs
    ctx.save_for_backward(x, w)


scaled_mm.register_autograd(_backward, setup_context=_setup)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 10))

    def forward(self, x):
        return scaled_mm(x, self.weight, 0.5).square().sum()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setattr(discover, "_found", {})
    monkeypatch.setattr(user_rules, "_USER_RULES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _rule(graph):
    analysis = analyze(graph)
    (op,) = (op for op in graph.ops if op.kind == "scaled_mm")
    assert analysis.discovered == (op.name,) and not analysis.unknown
    return str(analysis.rules[op.name])


def test_a_custom_operator_needs_no_registration(tmp_path):
    graph = sw.capture(Custom(), (torch.randn(8, 6),))
    assert _rule(graph) == "f1 f0, f0 f2 -> f1 f2"
    assert not list(tmp_path.iterdir())  # the operator may be another one tomorrow


def test_the_users_word_goes_before_the_experiment():
    sw.rule("shardwright_tests::scaled_mm", "m k!, k! n -> m n")
    assert _rule(sw.capture(Custom(), (torch.randn(8, 6),))) == "m k, k n -> m n"


@pytest.mark.parametrize(
    "operator, notation, words",
    [
        ("scaled_mm", "m -> m", "names no operator; write namespace::name"),
        ("mine::scaled_mm", "m, m", "needs one '->'"),
    ],
)
def test_a_malformed_statement_is_refused(operator, notation, words):
    with pytest.raises(ValueError, match=words):
        sw.rule(operator, notation)


def test_a_statement_that_does_not_fit_says_so():
    sw.rule("shardwright_tests::scaled_mm", "m k, k -> m")
    graph = sw.capture(Custom(), (torch.randn(8, 6),))
    with pytest.raises(ValueError, match=r"rule 'm k, k -> m' of shardwright_tests\.scaled_mm"):
        analyze(graph)


class Exotic(nn.Module):
    """Uses an operator of torch's that no rule is written for."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return torch.special.i1e(self.layer(x)).sum()


def test_findings_about_torchs_operators_are_kept_on_disk(tmp_path, monkeypatch):
    graph = sw.capture(Exotic(), (torch.randn(8, 6),))
    assert len(analyze(graph).discovered) == 1
    (file,) = tmp_path.glob("shardwright/*.json")
    (notation,) = json.loads(file.read_text()).values()
    assert notation == "f1 f0 -> f1 f0"
    monkeypatch.setattr(discover, "_found", {})
    monkeypatch.setattr(discover, "discover", None)  # not asked again
    assert sw.capture(Exotic(), (torch.randn(8, 6),)).ops == graph.ops


def test_a_spoilt_file_is_found_out_again(tmp_path):
    graph = sw.capture(Exotic(), (torch.randn(8, 6),))
    (file,) = tmp_path.glob("shardwright/*.json")
    file.write_text("{")
    discover._found.clear()
    assert sw.capture(Exotic(), (torch.randn(8, 6),)).ops == graph.ops
    assert len(json.loads(file.read_text())) == 1
