"""Functions with a backward of their own keep it: `torch.autograd.Function` and custom operators.

A user trained a network with a straight-through estimator (sign forward, identity backward), a
clipped and a reversed gradient. Capture traced through their forwards, autograd differentiated
those, and the plan trained with zeros where the estimator gives gradients; `verify` compared the
graph with itself and said "equals, 0.0". Now such a call is one operator that runs the function's
own `apply`. It is split along dimensions where both passes recombine, and a function that does more
than to compute its results is refused in one line that names the user's.
"""

import importlib
import sys

import numpy as np
import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError
from shardwright.plan_io.plan_text import plan_to_json
from shardwright.report.text.explain import explain
from shardwright.runtime.verify.module_pickling import pack, unpack
from shardwright.runtime.verify.verify import one_device
from shardwright.tracing.call import CaptureError
from shardwright.tracing.capture import capture_call
from shardwright.tracing.discovery.discover import capture_with_rules
from shardwright.tracing.export.export import FlatCall, export
from shardwright.tracing.gradients.autograd_functions import _BASE, Functions, calls_runnable
from shardwright.tracing.gradients.gradient_probe import Suspicion, probe
from tests.harness.ranks import run_ranks, whole

Function = torch.autograd.Function
FUNCTION = "shardwright.function.default"


class Sign(Function):
    """A straight-through estimator with a clipped gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.5, 0.5)


class Reversed(Function):
    """The identity, as a view, whose gradient is reversed; with an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.weight * gradient, None


class Coded(Function):
    """Several operands and results, one without a derivative; asks which gradients are wanted."""

    @staticmethod
    def forward(x, codes, options):
        index = torch.cdist(x, codes).argmin(-1)
        return codes[index] * options["scale"], index, x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, codes, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, codes, output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_codes, _, to_x):
        x, codes, index = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, True, False)
        moved = torch.zeros_like(codes).index_add(0, index, 0.25 * (codes[index] - x))
        return to_codes + 3.0 * to_x, moved, None


class Clipped(Function):
    """The gradient's norm over everything is clipped: no dimension can be split."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (10.0 / gradient.norm().clamp(min=10.0))


class Outer(Function):
    """Calls another function within, and autograd of its own."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            inside = x.detach().requires_grad_()
            made = Reversed.apply(inside, 0.5).tanh()
        ctx.save_for_backward(inside, made)
        return made.detach()

    @staticmethod
    def backward(ctx, gradient):
        inside, made = ctx.saved_tensors
        return torch.autograd.grad(made, inside, gradient)[0]


class Numpy(Function):
    """Looks at values, which the meta device has not."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.floor(x.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.5


class Head(Function):
    """Compares a size with a number."""

    @staticmethod
    def forward(ctx, x):
        return x * (x.shape[-1] if x.shape[-1] > 20 else 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class ReadsMore(Function):
    @staticmethod
    def forward(ctx, x, module):
        return x @ module.weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Counting(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counting.calls += 1
        return x * Counting.calls

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Noisy(Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


sign = Sign.apply  # bound before any capture, as code usually does


class Layer(nn.Module):
    def __init__(self, call=sign):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8)
        self.call = call

    def forward(self, x):
        return x + self.down(self.call(self.norm(self.up(x))))


class Net(nn.Module):
    """All of them, in layers that repeat."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.codes = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        found, index, x = Coded.apply(Reversed.apply(x, 0.3), self.codes, {"scale": 1.5})
        x = Clipped.apply(Outer.apply(x)) * index.unsqueeze(-1)
        return (found * x).square().sum() + Numpy.apply(x.sum(0)).sum()


def example():
    torch.manual_seed(0)
    return Net().double(), torch.randn(6, 6, dtype=torch.float64)


def functions_of(graph):
    return [op for op in graph.ops if op.target == FUNCTION]


def one(call):
    """A model with one call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Layer(call)).double(), torch.randn(5, 4).double()


def test_the_graph_has_the_gradients_of_the_module():
    model, x = example()
    captured = capture_call(model, (x,))
    call = FlatCall(model, {"args.0": x}, {})
    with calls_runnable(captured.opaque):
        probe(call, {"args.0": x}, captured, [Suspicion("a function", "")])
    payload = {
        "weights": dict(model.named_parameters()),
        "buffers": {},
        "constants": captured.constants,
        "output_keys": captured.output_keys,
        "opaque": captured.opaque,
    }
    program = one_device(captured.graph, payload)
    program(x).backward()
    model(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(program.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_call_is_one_operator_and_split_where_both_passes_recombine(device):
    model, x = example()
    graph = capture_with_rules(model.to(device), (x,)).graph
    rules = {str(op.args[2]): op.rule.split(" -> ")[-1] for op in functions_of(graph)}
    assert rules == {
        "Sign(_)": "f0 f1",
        "Reversed(_, 0.3)": "f0 f1",
        "Coded(_, _, (scale=1.5))": "f0 r0d1!, f0, f0 r2d1!",
        "Outer(_)": "f0 f1",
        "Clipped(_)": "",
        "Numpy(_)": "",
    }
    coded = next(op for op in functions_of(graph) if len(op.outputs) == 3)
    assert [graph.tensor[name].requires_grad for name in coded.outputs] == [True, False, True]
    assert all("test_autograd_functions.py" in op.source.file for op in functions_of(graph))


def test_layers_that_repeat_are_traced_once_to_the_same_graph():
    model, x = example()
    expected = capture_call(model, (x,)).graph
    assert capture_call(model.to("meta"), (x,)).graph.fingerprint == expected.fingerprint
    keys = [op.args[1] for op in functions_of(expected)]
    assert keys[:3] == ["Sign"] * 3


def test_two_functions_of_one_name_stay_apart():
    def made(factor):
        class Scaled(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                return factor * gradient

        return Scaled.apply

    one_, other = made(2.0), made(3.0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (one_(self.w) * x).sum() + other(self.w).sum()

    captured = capture_call(Both(), (torch.ones(4),))
    assert [op.args[1] for op in functions_of(captured.graph)] == ["Scaled", "Scaled#1"]


@pytest.mark.parametrize(("width", "columns"), [(12, True), (64, False)])
def test_a_rule_holds_for_sizes_on_the_same_side_of_the_numbers_in_the_code(width, columns):
    """Beyond 20 columns `Head` scales by their number; small experiments alone would not see it."""
    model = nn.Linear(4, width)

    class Wide(nn.Sequential):
        def forward(self, x):
            return Head.apply(super().forward(x)).sum()

    graph = capture_with_rules(Wide(model), (torch.ones(6, 4),)).graph
    (op,) = functions_of(graph)
    rows, found = op.rule.split(" -> ")[-1].split()
    assert rows.startswith("f") and found.startswith("f") is columns


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: InPlace.apply(x * 1), "changes a tensor that it is given in place"),
        (lambda x: ReadsMore.apply(x, _LINEAR), r"reads a tensor of shape \(12, 12\) that is not"),
        (Counting.apply, "changes attributes of its class"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_more_than_to_compute_is_refused_with_the_users_line(call, message, device):
    model, x = one(call)
    with pytest.raises(
        CaptureError, match=rf"^\S+test_autograd_functions.py:\d+: .*{message}"
    ) as e:
        capture_call(model.to(device), (x,))
    assert "\n" not in str(e.value)


_LINEAR = nn.Linear(12, 12).double()


def test_one_that_draws_random_numbers_is_in_a_module_that_is_kept_whole():
    model, x = one(Noisy.apply)
    graph = capture_call(model, (x,)).graph
    assert any(op.kind == "opaque" for op in graph.ops) and "draws random numbers" in graph.note
    with pytest.raises(CaptureError, match=r"draws random numbers .* pass them to apply"):
        capture_call(model.to("meta"), (x,))


def test_strict_mode_does_not_trace_through_one():
    model, x = one(sign)
    call = FlatCall(model, {"args.0": x}, {})

    def fails(*args):
        if not torch.compiler.is_dynamo_compiling():
            raise RuntimeError("only strict mode gets past this")
        return Sign.apply(*args)

    model[1].call = fails
    with pytest.raises(CaptureError), Functions(model).intercepted():
        export(call, {"args.0": x})


def test_custom_operators_keep_the_backward_that_is_registered():
    @torch.library.custom_op("regressions::reversed", mutates_args=())
    def reversed_(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    reversed_.register_fake(lambda x: torch.empty_like(x))
    reversed_.register_autograd(lambda ctx, gradient: -3.0 * gradient)
    model, x = one(reversed_)
    captured = capture_with_rules(model, (x,))
    (op,) = (op for op in captured.graph.ops if op.target == "regressions.reversed.default")
    assert op.rule.endswith("-> f1 f0") or op.rule.endswith("-> f0 f1")
    with calls_runnable(captured.opaque):
        probe(FlatCall(model, {"args.0": x}, {}), {"args.0": x}, captured, [Suspicion("it", "")])


def test_torch_is_as_before():
    before = dict(vars(_BASE))
    with pytest.raises(KeyError), Functions(nn.Identity()).intercepted():
        assert "apply" in vars(_BASE)
        raise KeyError
    assert dict(vars(_BASE)) == before and "apply" not in before
    assert Sign.apply(torch.ones(2, requires_grad=True)).grad_fn is not None


def test_a_remark_names_the_function():
    model, x = example()
    plan = sw.plan(model, (x,), machine=sw.Machine.preset("2xcpu"), optimizer="sgd")
    text = " ".join(explain(plan).split())
    assert "autograd function Clipped(_)" in text and "no rule is written" in text
    assert "autograd function Sign(_)" in text


def plans():
    model, x = example()
    found = sw.search(sw.capture(model, (x,)), sw.Machine.preset("2xcpu"), "sgd").baselines
    named = {plan.name: plan for plan in found}
    return [named[name] for name in ("data parallel", "tensor parallel")]


@pytest.mark.ranks
def test_plans_on_ranks_have_the_gradients_of_the_module():
    run_ranks(2, _same_gradients, [plan_to_json(plan) for plan in plans()])


def _same_gradients(texts):
    for text in texts:
        model, x = example()
        module = sw.parallelize(model, sw.Plan.from_json(text))
        loss, expected = module(x), model(x)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        loss.backward()
        expected.backward()
        for name, parameter in model.named_parameters():
            mine = whole(module.get_parameter(name).grad).reshape(parameter.shape)
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-10, atol=1e-10)


def test_functions_are_sent_to_the_ranks_of_verify():
    model, x = example()
    calls = capture_call(model, (x,)).opaque
    sent = unpack(pack(calls))
    given = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    (found,) = sent["Sign"]([given])
    found.sum().backward()
    assert torch.equal(given.grad, torch.full_like(given, 0.5))


def test_a_function_of_a_file_that_the_rank_cannot_import_is_loaded_from_it(tmp_path, monkeypatch):
    file = tmp_path / "signs_of_a_user.py"
    file.write_text(
        "import torch\n\n\nclass Negative(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: -x)\n"
        "    backward = staticmethod(lambda ctx, gradient: -gradient)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("signs_of_a_user")
    model, x = one(module.Negative.apply)
    packed = pack(capture_call(model, (x,)).opaque)
    monkeypatch.undo()  # a rank has another path
    del sys.modules["signs_of_a_user"]
    (call,) = unpack(packed).values()
    assert torch.equal(call([torch.ones(3)])[0], -torch.ones(3))
    assert sys.modules.pop("signs_of_a_user").__file__ == str(file)


def test_a_function_that_cannot_be_sent_is_told():
    class Local(Sign):
        pass

    model, x = one(Local.apply)
    plan = sw.plan(model, (x,), machine=sw.Machine.preset("2xcpu"), optimizer="sgd", loss="outside")
    with pytest.raises(PlanError, match=r"Local cannot be sent"):
        sw.verify(model, plan, (x,))
