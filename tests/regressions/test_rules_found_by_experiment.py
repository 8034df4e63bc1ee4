"""Rules that experiments found and that were not true, or not found where they could be.

`masked_scatter` with a mask of one element was split: in all three samples the mask was false, so
that the operator returned its input. Whatever depends on its data could pass for a rule in this
way: three samples of well-behaved numbers at one set of sizes, cut at one place. The false rules
stayed on disk for the next run. A false rule that the user stated was believed without a trial.

On the other hand no rule was found for a batched Cholesky decomposition, as no sample was positive
definite, nor for any operator on complex numbers.

Now a rule has to hold for families of values, two sets of sizes and three places of the cut; the
file of findings is named after the code that found them; statements are tried.
"""

import json
import os

import pytest
import torch

import shardwright as sw
from shardwright.rules import user_rules
from shardwright.tracing.discovery import discover as findings
from shardwright.tracing.discovery.experiment import discover
from tests.harness.drawn_tensors import f
from tests.harness.operator_calls import call


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    monkeypatch.setattr(findings, "_found", {})
    monkeypatch.setattr(user_rules, "_USER_RULES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _found(one):
    return discover(one.op, one.graph)


def test_a_mask_of_one_element_is_true_in_some_sample():
    """Where it is true rows of the source are taken from its beginning, on every tile."""
    assert _found(call("masked_scatter.default", f(5, 7), torch.tensor(True), f(40))) is None


def _operator(name, function):
    """An operator of a user's, differentiable, of one tensor with a result of the same shape."""

    @torch.library.custom_op(f"shardwright_tests::{name}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return function(x.detach()).clone()

    operator.register_fake(lambda x: torch.empty_like(x))

    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(function(x), x, gradient)[0]

    operator.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    return f"shardwright_tests.{name}.default"


@pytest.mark.parametrize(
    "name, function",
    [
        # Each is elementwise but for values, or tiles, that well-behaved samples do not have.
        ("of_large", lambda x: x / x.abs().max().clamp(min=50.0)),
        ("of_tiny", lambda x: x * (2.0 if x.abs().max() < 1e-3 else 1.0)),
        ("of_zeros", lambda x: x + (x == 0).sum()),
        ("of_ties", lambda x: x * (1 + (x.unsqueeze(-1) == x.flatten()).sum() - x.numel())),
        ("of_negatives", lambda x: x * (2.0 if (x < 0).all() else 1.0)),
        ("of_infinities", lambda x: x.where(x.isfinite().all(), x * 0)),
        ("of_one_row", lambda x: x * (2.0 if x.shape[0] == 1 else 1.0)),
        ("of_odd_sizes", lambda x: x * 2.0 if x.shape[0] % 2 == 0 else x * x.shape[0]),
    ],
)
def test_what_depends_on_the_data_is_not_split(name, function):
    """Rows, that is: some of these are elementwise along the other dimension."""
    text = _found(call(_operator(name, function), f(6, 10)))
    assert text is None or text.startswith("w0d0! "), text


def test_indices_that_come_twice_count():
    """Rows are written as often as they are chosen: the last wins, or is it the first of a tile?"""

    def counted(x):
        rows = x.abs().long().clamp(max=4).flatten()
        return x * torch.bincount(rows, minlength=5).max()

    assert _found(call(_operator("of_duplicates", counted), f(6, 10))) is None


@torch.library.custom_op("shardwright_tests::keeps_count", mutates_args=())
def keeps_count(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    torch.Tensor.numpy(count)[...] += 1  # nothing says so, not even a version
    return x * 2


def test_an_operator_that_writes_to_an_operand_has_no_rule():
    with torch.no_grad():
        one = call("shardwright_tests.keeps_count.default", f(6, 10), torch.zeros(10).double())
    assert _found(one) is None


def test_a_crash_on_harsh_values_keeps_what_was_found_before_it():
    """Indices below zero end the process, which is one of its own."""

    def fragile(x):
        if (x > 1e20).any():
            os.abort()
        return x * 2

    assert _found(call(_operator("fragile", fragile), f(6, 10))) == "f0 f1 -> f0 f1"


def _positive_definite(*shape):
    x = torch.randn(*shape, shape[-1], dtype=torch.float64, generator=torch.Generator())
    return (x @ x.mT + torch.eye(shape[-1])).requires_grad_()


@pytest.mark.parametrize(
    "one, notation",
    [
        (
            lambda: call("linalg_cholesky.default", _positive_definite(6, 4)),
            "f0 w0d1! w0d2! -> f0 r0d1! r0d2!",
        ),
        (
            lambda: call("cholesky.default", _positive_definite(6, 4)),
            "f0 w0d1! w0d2! -> f0 r0d1! r0d2!",
        ),
        (
            lambda: call("view_as_real.default", torch.complex(f(5, 7), f(5, 7))),
            "f0 f1 -> f0 f1 r0d2!",
        ),
        (
            lambda: call("fft_ifft.default", torch.complex(f(5, 7), f(5, 7))),
            "f0 w0d1! -> f0 r0d1!",
        ),
    ],
    ids=["linalg_cholesky", "cholesky", "view_as_real", "ifft"],
)
def test_rules_that_need_operands_of_a_domain_are_found(one, notation):
    assert _found(one()) == notation


class Exotic(torch.nn.Module):
    def forward(self, x, w):
        return torch.special.i1e(x * w).sum()


def test_rules_of_an_older_experiment_are_not_read(tmp_path):
    arguments = (torch.randn(8, 6), torch.randn(8, 6, requires_grad=True))
    graph = sw.capture(Exotic(), arguments)
    (file,) = tmp_path.glob("shardwright/*.json")
    false = dict.fromkeys(json.loads(file.read_text()), "f0 w! -> w! f0")
    file.unlink()
    (file.parent / f"rules-torch-{torch.__version__}.json").write_text(json.dumps(false))
    findings._found.clear()
    assert sw.capture(Exotic(), arguments).ops == graph.ops


@torch.library.custom_op("shardwright_tests::centred", mutates_args=())
def centred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) * w


centred.register_fake(lambda x, w: torch.empty_like(x))


class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(6))

    def forward(self, x):
        return torch.ops.shardwright_tests.centred(x, self.w.detach()).sum() + self.w.sum()


def test_a_false_statement_is_refused_in_a_line():
    sw.rule("shardwright_tests::centred", "n c, c -> n c")
    with pytest.raises(ValueError, match=r"your rule for shardwright_tests\.centred.*says") as e:
        sw.capture(Centred(), (torch.randn(8, 6),))
    assert "splitting n gives another result than the whole" in str(e.value)
    assert "test_rules_found_by_experiment.py" in str(e.value) and "\n" not in str(e.value)
    sw.rule("shardwright_tests::centred", "n! c, c -> n! c")
    sw.capture(Centred(), (torch.randn(8, 6),))


@torch.library.custom_op("shardwright_tests::halves_affine", mutates_args=())
def halves_affine(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ w.bfloat16()).to(x.dtype) + b


halves_affine.register_fake(lambda x, w, b: x.new_empty(x.shape[0], w.shape[1]))


@pytest.mark.parametrize(
    "text, true", [("m k, k n, +n -> m n", True), ("m k, k n, n -> m n", False)]
)
def test_a_statement_is_tried_as_it_is_meant(text, true):
    """A sum over `k` needs the bias once; what bfloat16 rounds off is no other result."""

    class Affine(torch.nn.Module):
        def forward(self, x, w, b):
            return torch.ops.shardwright_tests.halves_affine(x, w, b).sum()

    sw.rule("shardwright_tests::halves_affine", text)
    arguments = (torch.randn(8, 6), torch.randn(6, 10), torch.randn(10))
    if true:
        sw.capture(Affine(), arguments)
    else:
        with pytest.raises(ValueError, match="splitting k gives another result"):
            sw.capture(Affine(), arguments)
