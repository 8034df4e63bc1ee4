"""Decompositions compute what the operators do, gradients included."""

import pytest
import torch
from torch import is_tensor

from shardwright.tracing.decompose.decompose import table

aten = torch.ops.aten
TABLE = table()
generator = torch.Generator().manual_seed(0)


def f(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def u(*shape):
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def labels(*shape):
    found = torch.randint(7, shape, generator=generator)
    found.view(-1)[::3] = -100
    return found


CLASSES = torch.randint(7, (5,), generator=generator)
CALLS = {
    "mean": (aten.mean.default, f(5, 7)),
    "mean of a scalar": (aten.mean.default, f()),
    "mean in another dtype": (aten.mean.default, f(5, 7), {"dtype": torch.float32}),
    "mean of dims": (aten.mean.dim, f(5, 6, 7), [0, -1]),
    "mean kept": (aten.mean.dim, f(5, 6, 7), [1], True),
    "mean of all dims": (aten.mean.dim, f(5, 6), None),
    "cross entropy": (aten.cross_entropy_loss.default, f(5, 7), labels(5)),
    "weighted": (aten.cross_entropy_loss.default, f(5, 7), labels(5), u(7)),
    "smooth": (aten.cross_entropy_loss.default, f(5, 7), labels(5), None, 1, -100, 0.1),
    "weighted and smooth": (
        aten.cross_entropy_loss.default, f(5, 7), labels(5), u(7), 1, -100, 0.1,
    ),
    "ignore three": (aten.cross_entropy_loss.default, f(5, 7), CLASSES, u(7), 1, 3),
    "probabilities": (aten.cross_entropy_loss.default, f(5, 7), u(5, 7)),
    "probabilities, weighted": (aten.cross_entropy_loss.default, f(5, 7), u(5, 7), u(7)),
    "of images": (aten.cross_entropy_loss.default, f(5, 7, 3, 2), labels(5, 3, 2)),
    "probabilities of images": (aten.cross_entropy_loss.default, f(5, 7, 3), u(5, 7, 3)),
    "of one sample": (aten.cross_entropy_loss.default, f(7), torch.tensor(3)),
    "probabilities of one sample": (aten.cross_entropy_loss.default, f(7), u(7)),
    "nll": (aten.nll_loss_nd.default, f(5, 7), labels(5)),
    "nll of images, weighted": (aten.nll_loss_nd.default, f(5, 7, 3), labels(5, 3), u(7)),
    "mse": (aten.mse_loss.default, f(5, 7), f(5, 7)),
    "l1": (aten.l1_loss.default, f(5, 7), f(5, 7)),
    "smooth l1": (aten.smooth_l1_loss.default, f(5, 7), f(5, 7), 1, 0.5),
    "huber": (aten.huber_loss.default, f(5, 7), f(5, 7), 1, 0.5),
    "bce": (aten.binary_cross_entropy.default, u(5, 7).requires_grad_(), u(5, 7)),
    "bce, weighted": (aten.binary_cross_entropy.default, u(5, 7).requires_grad_(), u(5, 7), u(7)),
    "bce of logits": (
        aten.binary_cross_entropy_with_logits.default, f(5, 7), u(5, 7), u(5, 1), u(7),
    ),
    "repeats of one": (aten.repeat_interleave.self_int, f(5, 1, 7), 3, 1),
    "repeats of the last": (aten.repeat_interleave.self_int, f(5, 1), 3, -1, {"output_size": 3}),
}  # fmt: skip


def run(function, args, kwargs):
    """What a function returns, and the gradients of its tensors."""
    tensors = [a.detach().clone().requires_grad_(a.requires_grad) for a in args if is_tensor(a)]
    given = iter(tensors)
    out = function(*(next(given) if is_tensor(a) else a for a in args), **kwargs)
    wanted = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    (out * wanted).sum().backward()
    return out.detach(), [t.grad for t in tensors if t.requires_grad]


@pytest.mark.parametrize("name", CALLS)
def test_a_decomposition_computes_what_the_operator_does(name):
    operator, *args = CALLS[name]
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    expected, gradients = run(operator, args, kwargs)
    found, ours = run(TABLE[operator], args, kwargs)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if kwargs else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(ours, gradients, **tolerance)


LOSSES = {  # position of the argument `reduction`
    aten.cross_entropy_loss.default: 3,
    aten.nll_loss_nd.default: 3,
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}


@pytest.mark.parametrize("operator", LOSSES)
def test_losses_that_are_no_means_stay(operator):
    assert operator._schema.arguments[LOSSES[operator]].name == "reduction"
    before = [f(5, 7), f(5, 7), None, None][: LOSSES[operator]]
    for kept in (0, 2):
        assert TABLE[operator](*before, kept) is NotImplemented


def test_everything_taken_apart_is_tested():
    attention = aten.scaled_dot_product_attention.default
    assert {*LOSSES, attention} <= set(TABLE)
    others = {aten.mean.default, aten.mean.dim, aten.repeat_interleave.self_int}
    assert {call[0] for call in CALLS.values()} == {*LOSSES, *others}


@pytest.mark.parametrize(
    "causal, mask", [(False, None), (True, None), (False, "bool"), (False, "float")]
)
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_taken_apart_is_attention(causal, mask, grouped):
    """With a probability so small that nothing is dropped."""
    heads = 2 if grouped else 4
    query, key, value = f(2, 4, 5, 6), f(2, heads, 5, 6), f(2, heads, 5, 6)
    kept = (u(5, 5) > 0.3) | torch.eye(5, dtype=torch.bool)
    given = {"bool": kept, "float": f(5, 5)}.get(mask)
    tiny = torch.finfo(torch.float64).tiny
    operator, kwargs = aten.scaled_dot_product_attention.default, {"enable_gqa": grouped}
    found, ours = run(TABLE[operator], (query, key, value, given, tiny, causal), kwargs)
    expected, gradients = run(operator, (query, key, value, given, 0.0, causal), kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, gradients, rtol=1e-12, atol=1e-12)
    assert TABLE[operator](query, key, value) is NotImplemented
