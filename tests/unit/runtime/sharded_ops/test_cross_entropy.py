"""The loss of a device that has all classes is torch's, with its gradients, for every option."""

from itertools import product

import pytest
import torch

from shardwright.ir.graph import Op, Ref
from shardwright.program.instructions import Joint
from shardwright.rules.operators import half_logits
from shardwright.runtime.sharded_ops.cross_entropy import TiledCrossEntropy

CLASSES, SAMPLES, IGNORED = 5, 6, 2
OPTIONS = [*product((False, True), (0.0, 0.3), (0, 2), (False, True))]


@pytest.mark.parametrize("weighted, smoothing, reduction, soft", OPTIONS)
def test_loss_and_gradients_are_those_of_torch(weighted, smoothing, reduction, soft):
    torch.manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, IGNORED, 4, 1, IGNORED, 3])
    if soft:
        target = torch.rand(SAMPLES, CLASSES, dtype=torch.float64).requires_grad_()
    weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5 if weighted else None
    ignored = -100 if soft else IGNORED
    args = (Ref("x"), Ref("t"), Ref("w") if weighted else None, reduction, ignored, smoothing)
    op = Op("loss", "aten.cross_entropy_loss.default", args, (), ("loss",))
    whole = ((0, CLASSES, CLASSES),)
    module = TiledCrossEntropy(Joint(op, ("tp",), whole, True, ((),)), lambda x, how: x)
    given = [logits, target] + [weight] * weighted
    expected = torch.nn.functional.cross_entropy(
        logits,
        target,
        weight,
        ignore_index=ignored,
        reduction="sum" if reduction else "none",
        label_smoothing=smoothing,
    )
    found = module(*given)
    torch.testing.assert_close(found, expected)
    leaves = [logits, target] if soft else [logits]
    along = torch.randn(expected.shape, dtype=torch.float64)
    want = torch.autograd.grad(expected, leaves, along)
    for one, other in zip(torch.autograd.grad(found, leaves, along), want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("smoothing", (0.0, 0.3))
def test_half_precision_is_computed_in_float32_and_leaves_the_logits(smoothing):
    torch.manual_seed(0)
    given = torch.randn(SAMPLES, CLASSES).bfloat16()
    logits = given.clone().requires_grad_()
    target = torch.tensor([0, IGNORED, 4, 1, IGNORED, 3])
    args = (Ref("x"), Ref("t"), None, 2, IGNORED, smoothing)
    op = Op("loss", "aten.cross_entropy_loss.default", args, (), ("loss",))
    module = TiledCrossEntropy(
        Joint(op, ("tp",), ((0, CLASSES, CLASSES),), True, ((),)), lambda x, how: x
    )
    wide = given.float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        wide, target, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
    found = module(logits, target)
    assert torch.equal(found, expected.bfloat16())
    found.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, wide.grad.bfloat16(), rtol=1e-2, atol=0)
    assert torch.equal(logits.detach(), given)


@pytest.mark.parametrize("part", (1, 4 * CLASSES, 2**22))
@pytest.mark.parametrize("reduction", (0, 2))
def test_logits_that_are_cast_by_rows_have_a_loss_in_float32(part, reduction, monkeypatch):
    monkeypatch.setattr(half_logits, "_PART", part)
    torch.manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES).bfloat16().requires_grad_()
    given = logits.detach().clone()
    target = torch.tensor([0, IGNORED, 4, 1, IGNORED, 3])
    args = (Ref("x"), Ref("t"), None, reduction, IGNORED)
    op = Op("loss", half_logits.CROSS_ENTROPY, args, (), ("loss",))
    module = TiledCrossEntropy(
        Joint(op, ("tp",), ((0, CLASSES, CLASSES),), True, ((),)), lambda x, how: x
    )
    wide = given.float().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        wide, target, ignore_index=IGNORED, reduction="sum" if reduction else "none"
    )
    found = module(logits, target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    along = torch.linspace(0.5, 2.0, expected.numel()).view(expected.shape)
    (gradient,) = torch.autograd.grad(found, logits, along)
    (of_copy,) = torch.autograd.grad(expected, wide, along)
    torch.testing.assert_close(gradient, of_copy.bfloat16(), rtol=2**-7, atol=1e-7)
    assert torch.equal(logits.detach(), given)
