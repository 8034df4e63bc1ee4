"""A loss in chunks is that of the projection and cross entropy, with every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from shardwright.tracing.export.operators import operator_of

TOKENS, WIDTH, CLASSES = 12, 5, 17
CHUNKS = (1, 3, 17, 40)
OPERATOR = operator_of("shardwright.linear_cross_entropy.default")


def _operands(dtype):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(CLASSES, (TOKENS,), generator=generator)
    target[::4] = 2
    return (
        [draw(TOKENS, WIDTH), 3 * draw(CLASSES, WIDTH), draw(CLASSES)],
        target,
        draw(CLASSES).abs(),
    )


def _gradients(loss, operands):
    return [loss, *torch.autograd.grad(1.7 * loss, operands, allow_unused=True)]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_loss_and_gradients_are_those_of_the_module(chunks):
    operands, target, class_weight = _operands(torch.float64)
    for operand in operands:
        operand.requires_grad_()
    cases = itertools.product((True, False), (True, False), (0.0, 0.1), (-100, 2))
    for biased, weighted, smoothing, ignored in cases:
        x, weight, bias = operands
        bias, w = (bias if biased else None), (class_weight if weighted else None)
        logits = F.linear(x, weight, bias)
        options = {"weight": w, "ignore_index": ignored, "label_smoothing": smoothing}
        whole = F.cross_entropy(logits, target, reduction="sum", **options)
        given = (x, weight, bias, target, w, ignored, smoothing, chunks, torch.float64)
        chunked = OPERATOR(*given)
        pairs = zip(_gradients(whole, operands), _gradients(chunked, operands), strict=True)
        for expected, found in pairs:
            if expected is None:
                assert found is None
            else:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_narrow_logits_are_rounded_and_cast_as_in_the_module():
    operands, target, _ = _operands(torch.bfloat16)
    for operand in operands:
        operand.requires_grad_()
    x, weight, bias = operands
    whole = F.cross_entropy(F.linear(x, weight, bias).float(), target, reduction="sum")
    chunked = OPERATOR(x, weight, bias, target, None, -100, 0.0, 4, torch.float32)
    assert chunked.dtype == whole.dtype
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    expected, found = _gradients(whole, operands), _gradients(chunked, operands)
    assert [g.dtype for g in found] == [g.dtype for g in expected]
    torch.testing.assert_close(found[2], expected[2], rtol=2**-8, atol=0)  # of the weight: one ulp
    torch.testing.assert_close(found[1], expected[1], rtol=2**-6, atol=2**-6)


def test_frozen_operands_get_no_gradient_and_unknown_labels_no_loss():
    (x, weight, _), target, _ = _operands(torch.float64)
    given = (target, None, -100, 0.0, 3, torch.float64)
    OPERATOR(x.requires_grad_(), weight, None, *given).backward()
    assert x.grad is not None and weight.grad is None
    with torch.no_grad():
        assert OPERATOR(x, weight, None, target + CLASSES, *given[1:]).isnan()


def test_logits_that_are_minus_infinity_have_no_part_in_the_loss():
    (x, weight, bias), target, _ = _operands(torch.float64)
    bias = bias.masked_fill(torch.arange(CLASSES) < 6, -torch.inf).requires_grad_()
    target = 6 + target % 11
    whole = F.cross_entropy(F.linear(x, weight, bias), target, reduction="sum")
    chunked = OPERATOR(x, weight, bias, target, None, -100, 0.0, 6, torch.float64)
    for expected, found in zip(_gradients(whole, [bias]), _gradients(chunked, [bias]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_refused():
    (x, weight, _), target, _ = _operands(torch.float64)
    loss = OPERATOR(x.requires_grad_(), weight, None, target, None, -100, 0.0, 2, torch.float64)
    with pytest.raises(RuntimeError, match="a loss in chunks has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
