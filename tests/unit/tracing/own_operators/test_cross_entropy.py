"""The cross entropy of half-precision logits is that of a float32 copy, which is never whole."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from shardwright.rules.operators import half_logits
from shardwright.tracing.export.operators import operator_of

ROWS, CLASSES, IGNORED = 12, 17, 2
HALF = (torch.bfloat16, torch.float16)
OPERATOR = operator_of("shardwright.cross_entropy_loss.default")
REDUCTIONS = {0: "none", 2: "sum"}


@pytest.fixture(params=(1, 5 * CLASSES, 2**22))
def _parts(request, monkeypatch):
    """Parts of one row, of five, the last of two, and of all."""
    monkeypatch.setattr(half_logits, "_PART", request.param)


def _drawn(dtype, rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, CLASSES, generator=generator)
    target = torch.randint(CLASSES, (rows,), generator=generator)
    target[::4] = IGNORED
    return logits.to(dtype).requires_grad_(), target


def _of_copy(logits, target, reduction, ignored):
    """The loss on a float32 copy of the logits, and the gradient of the copy."""
    wide = logits.detach().float().requires_grad_()
    loss = F.cross_entropy(wide, target, ignore_index=ignored, reduction=REDUCTIONS[reduction])
    return loss, wide


@pytest.mark.usefixtures("_parts")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", (-100, IGNORED))
def test_loss_is_that_of_the_copy_and_the_gradient_is_rounded_once(dtype, reduction, ignored):
    logits, target = _drawn(dtype)
    expected, wide = _of_copy(logits, target, reduction, ignored)
    found = OPERATOR(logits, target, None, reduction, ignored)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    scale = torch.linspace(0.5, 3.0, ROWS) if reduction == 0 else torch.tensor(1.7)
    (gradient,) = torch.autograd.grad(found, logits, scale)
    (of_copy,) = torch.autograd.grad(expected, wide, scale)
    assert gradient.dtype == dtype
    assert (gradient == of_copy.to(dtype)).float().mean() >= 0.99
    torch.testing.assert_close(gradient.float(), of_copy, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", (0, ROWS))
def test_without_rows_that_count_the_loss_and_all_gradients_are_zero(dtype, rows):
    logits, target = _drawn(dtype, rows)
    found = OPERATOR(logits, torch.full_like(target, IGNORED), None, 2, IGNORED)
    (gradient,) = torch.autograd.grad(found, logits)
    assert found == 0.0
    assert torch.equal(gradient, torch.zeros_like(logits))


def test_logits_that_are_minus_infinity_are_those_of_no_gradient():
    logits, target = _drawn(torch.bfloat16)
    with torch.no_grad():
        logits[:, 5:7] = -torch.inf
    target[target >= 5] = 4
    expected, wide = _of_copy(logits, target, 2, -100)
    found = OPERATOR(logits, target, None, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (gradient,), (of_copy,) = (
        torch.autograd.grad(one, leaf) for one, leaf in ((found, logits), (expected, wide))
    )
    torch.testing.assert_close(gradient.float(), of_copy, rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_of_wider_logits_it_is_that_of_torch_to_the_bit(dtype):
    logits, target = _drawn(dtype)
    found = OPERATOR(logits, target, None, 2, IGNORED)
    expected = F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
    assert torch.equal(found, expected)
    pair = (torch.autograd.grad(loss, logits)[0] for loss in (found, expected))
    assert torch.equal(*pair)


def test_weights_smoothing_and_means_are_computed_on_the_copy():
    logits, target = _drawn(torch.bfloat16)
    weight = torch.linspace(0.5, 2.0, CLASSES)
    found = OPERATOR(logits, target, weight, 1, IGNORED, 0.1)
    expected = F.cross_entropy(
        logits.float(), target, weight, ignore_index=IGNORED, label_smoothing=0.1
    )
    assert torch.equal(found, expected)


def test_the_second_derivative_is_that_of_the_copy():
    logits, target = _drawn(torch.bfloat16)
    along = torch.linspace(-1, 1, CLASSES)
    found, expected = (
        torch.autograd.grad((first.float() * along).pow(2).sum(), logits)[0]
        for loss in (
            OPERATOR(logits, target, None, 2, IGNORED),
            F.cross_entropy(logits.float(), target, ignore_index=IGNORED, reduction="sum"),
        )
        for first in torch.autograd.grad(loss, logits, create_graph=True)
    )
    assert torch.equal(found, expected) and found.any()


def test_a_label_that_is_no_class_is_refused():
    logits, target = _drawn(torch.bfloat16)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        OPERATOR(logits, target + CLASSES, None, 2)


def test_logits_and_labels_alone_are_kept():
    logits, target = _drawn(torch.bfloat16)
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        OPERATOR(logits, target, None, 2)
    assert sorted(kept) == sorted((logits.data_ptr(), target.data_ptr()))


def test_it_compiles_in_one_graph():
    logits, target = _drawn(torch.bfloat16)

    def loss(logits, target):
        return OPERATOR(logits * 2.0, target, None, 2, IGNORED) * 0.5

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    pairs = [(f(logits, target), logits) for f in (loss, compiled)]
    assert torch.equal(*(value for value, _ in pairs))
    assert torch.equal(*(torch.autograd.grad(*pair)[0] for pair in pairs))
