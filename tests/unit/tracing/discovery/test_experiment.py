"""Rules found by running an operator on tiles."""

import pytest
import torch

from shardwright.ir.graph import Graph, Leaf, LeafKind, Op, Ref, Tensor
from shardwright.tracing.call import CaptureError
from shardwright.tracing.discovery.experiment import discover


def _found(target, *args, shapes, results, dtype="float32"):
    """The notation found for one call whose operands x0, x1, … have these shapes."""
    names = [f"x{i}" for i in range(len(shapes))]
    outputs = tuple(f"y.{i}" for i in range(len(results))) if len(results) > 1 else ("y",)
    values = [Tensor(n, s, dtype, True) for n, s in zip(names, shapes, strict=True)]
    values += [Tensor(n, s, dtype, True) for n, s in zip(outputs, results, strict=True)]
    op = Op("y", target, args, (), outputs)
    leaves = tuple(Leaf(n, LeafKind.BUFFER, (n,)) for n in names)
    return discover(op, Graph(leaves, (op,), outputs, tuple(values)))


X0, X1 = Ref("x0"), Ref("x1")


@pytest.mark.parametrize(
    "target, args, shapes, results, notation",
    [
        (
            "aten.mm.default",
            (X0, X1),
            [(4096, 512), (512, 128)],
            [(4096, 128)],
            "f2 f1, f1 f0 -> f2 f0",
        ),
        ("aten.softmax.int", (X0, -1), [(8, 9)], [(8, 9)], "f0 w0d1! -> f0 r0d1!"),
        ("aten.sum.dim_IntList", (X0, (1,)), [(8, 9)], [(8,)], "f0 f1 -> f0"),
        ("aten.mul.Tensor", (X0, X0), [(8, 9)], [(8, 9)], "f0 f1, f0 f1 -> f0 f1"),
        (
            "aten.repeat_interleave.self_int",
            (X0, 3, 0),
            [(8, 9)],
            [(24, 9)],
            "f0 f1 -> (f0 q0_0!) f1",
        ),
        # Sums of positive numbers would pass through a ReLU, those of all numbers do not.
        ("aten.amax.default", (X0, (1,)), [(8, 9)], [(8,)], "f0 w0d1! -> f0"),
        ("aten.argsort.default", (X0, 1), [(8, 9)], [(8, 9)], "f0 w0d1! -> f0 r0d1!"),
        ("aten.fft_rfft.default", (X0,), [(8,)], [(5,)], None),
    ],
)
def test_the_rule_is_found(target, args, shapes, results, notation):
    assert _found(target, *args, shapes=shapes, results=results) == notation


@pytest.fixture(params=["here", "in the parent", "without gradients"])
def differentiated(request, monkeypatch):
    """Autograd works in forked processes, or in the parent alone; or the caller wants none."""
    works = request.param != "in the parent"
    monkeypatch.setitem(discover.__globals__, "_differentiates", lambda: works)
    if request.param != "without gradients":
        yield
    else:
        with torch.inference_mode():
            yield


@pytest.mark.usefixtures("differentiated")
def test_gradients_count():
    """Scaling gradients by how often a row is looked up needs all look-ups together."""
    weight, places = Tensor("x0", (50, 6), "float32", True), Tensor("x1", (9,), "int64")
    for scaled, notation in (
        (False, "w0d0! f0, f1 -> f1 f0"),
        (True, "w0d0! f0, w1d0! -> r0d0! f0"),
    ):
        op = Op("y", "aten.embedding.default", (X0, X1, -1, scaled), (), ("y",))
        leaves = (Leaf("x0", LeafKind.BUFFER, ("x0",)), Leaf("x1", LeafKind.BUFFER, ("x1",)))
        values = (weight, places, Tensor("y", (9, 6), "float32", True))
        assert discover(op, Graph(leaves, (op,), ("y",), values)) == notation


@torch.library.custom_op("shardwright_tests::fails_back", mutates_args=())
def fails_back(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@fails_back.register_autograd
def _fail(ctx, grad):
    raise ValueError("only of eight")


@pytest.mark.usefixtures("differentiated")
def test_an_operator_whose_backward_pass_fails_has_no_rule():
    name = "shardwright_tests.fails_back.default"
    assert _found(name, X0, shapes=[(8,)], results=[(8,)]) is None


@torch.library.custom_op("shardwright_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, dtype=x.dtype)


def test_an_operator_that_draws_in_secret_is_refused():
    with pytest.raises(CaptureError, match=r"noisy.*gives another result"):
        _found("shardwright_tests.noisy.default", X0, shapes=[(8,)], results=[(8,)])
