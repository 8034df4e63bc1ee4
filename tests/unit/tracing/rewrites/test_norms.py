"""RMS norms of single operators become torch's kernel, and nothing else does."""

import pytest
import torch

import shardwright as sw
from shardwright.tracing.capture import capture_call
from shardwright.tracing.export.operators import call_op

WIDTH = 8


class Norm(torch.nn.Module):
    """A norm as models write it, in one of some forms."""

    def __init__(self, form, dtype=torch.float64):
        super().__init__()
        self.form = form
        shape = (1,) if form == "one weight" else (WIDTH,)
        self.weight = torch.nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x):
        x = x * 1.0
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        square = (
            wide * wide if self.form == "product" else wide.pow(3 if self.form == "cube" else 2)
        )
        dims = (-2, -1) if self.form == "two dimensions" else -1
        size = square.mean(dims, keepdim=True) + (wide if self.form == "no eps" else 1e-3)
        scale = torch.rsqrt(size)
        out = (x if self.form == "t5" else wide) * scale
        if self.form == "gemma":
            return (out * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        out = out.to(x.dtype)
        if self.form == "scale is read":
            return out * self.weight + scale.to(x.dtype)
        return out if self.form == "no weight" else self.weight * out


def ops_of(form, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(3, 4, WIDTH, dtype=dtype, requires_grad=True)
    module = Norm(form, dtype)
    return module, x, capture_call(module, (x,), {}).graph


@pytest.mark.parametrize("form", ["llama", "product", "t5", "no weight", "gemma", "one weight"])
def test_a_norm_is_one_operator_with_the_same_gradients(form):
    module, x, graph = ops_of(form)
    (norm,) = (op for op in graph.ops if op.kind == "rms_norm")
    assert not {"pow", "rsqrt", "sum"} & {op.kind for op in graph.ops}
    assert (len(norm.operands) == 2) == (form in ("llama", "product", "t5", "gemma"))
    values = {"args.0": x, **dict(module.named_parameters())}
    for op in graph.ops:
        made = call_op(op, {name: values[name] for name in op.operands}, torch.device("cpu"))
        values.update(zip(op.outputs, made, strict=True))
    found, expected = values[graph.outputs[0]], module(x)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    leaves = [x, *(() if form == "no weight" else (module.weight,))]
    torch.testing.assert_close(
        torch.autograd.grad(found.pow(2).sum(), leaves),
        torch.autograd.grad(expected.pow(2).sum(), leaves),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("form", ["cube", "two dimensions", "no eps", "scale is read"])
def test_what_is_no_such_norm_stays(form):
    _, _, graph = ops_of(form)
    assert "rms_norm" not in [op.kind for op in graph.ops]
    assert "rsqrt" in [op.kind for op in graph.ops]


@pytest.mark.parametrize("form", ["llama", "t5"])
def test_in_half_precision_nothing_wide_is_kept(form):
    _, _, graph = ops_of(form, torch.bfloat16)
    (norm,) = (op for op in graph.ops if op.kind == "rms_norm")
    assert {graph.tensor[name].dtype for name in norm.operands} == {"bfloat16"}
    assert (norm.saves, norm.extra_saved) == (norm.operands, 3 * 4 * 4)
    assert not any(tensor.dtype == "float32" for tensor in graph.values)
    _, _, gemma = ops_of("gemma", torch.bfloat16)
    (norm,) = (op for op in gemma.ops if op.kind == "rms_norm")
    assert {gemma.tensor[name].dtype for name in norm.operands} == {"float32"}


class Split(torch.nn.Module):
    """Norms of features that heads or a gate make, and one of their sum."""

    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        made = self.linear(x)
        if self.form == "merged heads":
            made = made.view(3, 4, 2, WIDTH // 2).sin().view(3, 4, WIDTH)
        elif self.form == "gated":
            made = made * torch.sigmoid(x)
        elif self.form == "sum":
            made = made + x
        elif self.form == "one head":
            made = made.view(3, 4, 2, WIDTH // 2)
        out = made * torch.rsqrt(made.pow(2).mean(-1, keepdim=True) + 1e-3)
        return out.view(3, 4, 2, WIDTH // 2) if self.form == "split after it" else out * 2


@pytest.mark.parametrize("form", ["merged heads", "gated", "split after it", "sum", "one head"])
def test_norms_of_features_that_are_split_stay(form):
    x = torch.randn(3, 4, WIDTH, requires_grad=True)
    graph = capture_call(Split(form), (x,), {}).graph
    kinds = [op.kind for op in graph.ops]
    assert ("rms_norm" in kinds) == (form in ("sum", "one head"))
    assert ("rsqrt" in kinds) != ("rms_norm" in kinds)


def test_a_model_keeps_its_norms_if_asked():
    x = torch.randn(3, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    module = Norm("llama")
    kinds = [op.kind for op in sw.capture(module, (x,), loss="outside", norms="model").ops]
    assert "rsqrt" in kinds and "rms_norm" not in kinds
    assert "norms=model" in str(sw.capture(module, (x,), loss="outside", norms="model").numerics)
    with pytest.raises(ValueError, match="norms='some' is not known; write norms='fused' or"):
        sw.capture(module, (x,), norms="some")
