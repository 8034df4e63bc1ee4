"""Linear layers in 8 bits: equal to torchao's, and as near to the product as the format allows."""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.runtime.sharded_ops.fp8_linear import Fp8Linear, require_8_bit
from tests.harness.torchao_layers import outcome

ROOT = Path(__file__).parents[4]
TORCHAO = ROOT / "build" / "frameworks" / "torchao"
RECIPES = ("tensorwise", "rowwise")
WIDTH, OUT = 64, 48


class Layer(nn.Module):
    """A linear layer of ours in place of one of torch."""

    def __init__(self, recipe, like):
        super().__init__()
        self.weight, self.bias = like.weight, like.bias
        self.run = Fp8Linear(f"torchao:{recipe}")

    def forward(self, x):
        return self.run(x, self.weight, self.bias)


def given(*shape):
    """Rows whose sizes differ by factors."""
    rows = torch.randn(*shape[:-1], 1).exp()
    return torch.randn(*shape) * rows


def reference(tmp_path, cases):
    """What torchao computes of each case."""
    if not TORCHAO.exists() and "CI" not in os.environ:
        pytest.skip("torchao is not installed: run `make build/frameworks/.ready`")
    files = [str(tmp_path / name) for name in ("cases.pt", "results.pt")]
    torch.save(cases, files[0])
    command = [sys.executable, "-m", "tests.harness.torchao_layers", str(TORCHAO), *files]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return torch.load(files[1])


def assert_same(ours, theirs):
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert ours[2].keys() == theirs[2].keys()
    for name, grad in ours[2].items():
        # Gradients of parameters that are kept in float32 are what torchao has in bfloat16.
        assert torch.equal(grad, theirs[2][name].to(grad.dtype)), name


def test_layers_and_plans_for_one_device_equal_those_of_torchao_to_the_bit(tmp_path):
    torch.manual_seed(0)
    cases, ours = [], []
    for recipe, dtype, bias in product(
        RECIPES, (torch.bfloat16, torch.float16, torch.float32), (True, False)
    ):
        linear = nn.Linear(WIDTH, OUT, bias=bias).to(dtype)
        x, grad = given(4, 8, WIDTH).to(dtype), 1e-3 * given(4, 8, OUT).to(dtype)
        cases.append((recipe, nn.Sequential(deepcopy(linear)), (), x, grad))
        result, of_x, grads = outcome(Layer(recipe, linear), x, grad)
        ours.append((result, of_x, {f"0.{name}": value for name, value in grads.items()}))
    model = nn.Sequential(
        *(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, WIDTH), nn.GELU(), nn.Linear(WIDTH, OUT))
    )
    x, grad = given(32, WIDTH), 1e-3 * given(32, OUT).bfloat16()
    graph = sw.capture(model, (x.requires_grad_(),), precision="bf16", loss="outside")
    for recipe in RECIPES:
        cases.append((recipe, deepcopy(model).bfloat16(), ("4",), x.bfloat16(), grad))
        plan = sw.price(graph, "1xH100", f"fp8={recipe} compile=regional")
        ours.append(outcome(sw.parallelize(model, replace(plan, compiled=False)), x, grad))
        model.zero_grad()
    for mine, theirs in zip(ours, reference(tmp_path, cases), strict=True):
        assert_same(mine, (theirs[0], theirs[1].to(mine[1].dtype), theirs[2]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_differ_by_no_more_than_their_operands_are_rounded(recipe):
    """Three bits after the first round a factor by 2^-4 at most, of e5m2 two by 2^-3."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, OUT, bias=False)
    x, grad = torch.randn(32, WIDTH), torch.randn(32, OUT)
    result, of_x, grads = outcome(Layer(recipe, linear), x, grad)
    weight, of_weight = linear.weight.detach(), grads["weight"]
    coarse = 2**-4 if recipe == "rowwise" else 2**-3
    for found, left, right, rounded in (
        (result, x, weight.t(), 2**-4),
        (of_x, grad, weight, coarse),
        (of_weight, grad.t(), x, coarse),
    ):
        exact, most = left.double() @ right.double(), left.abs().double() @ right.abs().double()
        error = (found - exact).abs() / most
        # Scales of rows give results of bfloat16, and small elements are rounded to multiples.
        assert 0 < error.max() < (1 + 2**-4) * (1 + rounded) - 1 + 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_any_number_of_rows_have_results(recipe):
    torch.manual_seed(0)
    layer = Layer(recipe, nn.Linear(WIDTH, OUT).bfloat16())
    zeros = torch.zeros(16, WIDTH, dtype=torch.bfloat16)
    result, of_x, grads = outcome(layer, zeros, torch.zeros(16, OUT, dtype=torch.bfloat16))
    assert torch.equal(result, layer.bias.expand(16, OUT))
    assert of_x.count_nonzero() == grads["weight"].count_nonzero() == 0
    layer.zero_grad()
    x, grad = given(5, WIDTH).bfloat16(), given(5, OUT).bfloat16()
    few = outcome(layer, x, grad)
    layer.zero_grad()
    more = outcome(layer, F.pad(x, (0, 0, 0, 11)), F.pad(grad, (0, 0, 0, 11)))
    assert torch.equal(few[0], more[0][:5]) and torch.equal(few[1], more[1][:5])
    assert torch.equal(few[2]["weight"], more[2]["weight"])


def test_a_second_derivative_is_refused_in_one_line():
    layer = Layer("rowwise", nn.Linear(WIDTH, OUT))
    result = layer(torch.randn(4, WIDTH))
    with pytest.raises(RuntimeError, match="a product in 8 bits has no second derivative"):
        torch.autograd.grad(result.sum(), layer.weight, create_graph=True)


@pytest.mark.parametrize(
    ("capability", "architecture", "runs"),
    [
        ((8, 0), None, False),
        ((8, 9), None, True),
        ((9, 0), None, True),
        ((9, 0), "gfx90a", False),
        ((9, 4), "gfx942:sramecc+", False),  # with formats of its own
        ((9, 5), "gfx950:sramecc+", True),
    ],
)
def test_a_gpu_without_these_products_is_refused_in_one_line(
    monkeypatch, capability, architecture, runs
):
    monkeypatch.setattr(torch.version, "hip", None if architecture is None else "7.0")
    found = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    require_8_bit(torch.device("cpu"))
    if runs:
        require_8_bit(torch.device("cuda"))
        return
    with pytest.raises(PlanError, match="A100 has no products in float8_e4m3fn") as refused:
        require_8_bit(torch.device("cuda"))
    assert "\n" not in str(refused.value)
