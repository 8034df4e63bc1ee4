"""An MLP in chunks is that of its products, with every gradient."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F

from shardwright.tracing.export.operators import operator_of

ROWS, WIDTH, INNER = (4, 3), 5, 7
CHUNKS = (1, 5, 40)
OPERATOR = operator_of("shardwright.chunked_mlp.default")
SILU = ["aten.silu.default", [{"value": 0}], {}]
GATED = json.dumps([SILU, ["aten.mul.Tensor", [{"value": 2}, {"value": 1}], {}]])
CUBED = ["aten.pow.Tensor_Scalar", [{"value": 0}, 3.0], {}]
PLAIN = json.dumps([CUBED, ["aten.add.Tensor", [{"value": 1}, {"value": 0}], {"alpha": 0.5}]])


def _operands(dtype):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    ups, biases = [draw(INNER, WIDTH) for _ in range(2)], [draw(INNER) for _ in range(2)]
    return draw(*ROWS, WIDTH), ups, biases, draw(WIDTH, INNER), draw(WIDTH)


def _whole(x, ups, biases, down, bias, gated):
    products = [F.linear(x, up, one) for up, one in zip(ups, biases, strict=True)]
    if gated:
        return F.linear(F.silu(products[0]) * products[1], down, bias)
    return F.linear(products[0].pow(3.0) + 0.5 * products[0], down, bias)


def _gradients(result, operands):
    weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
    return [result, *torch.autograd.grad((weights * result).sum(), operands)]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_results_and_gradients_are_those_of_the_module(chunks):
    x, every_up, every_bias, down, last = _operands(torch.float64)
    for gated, biased, turned in itertools.product((True, False), repeat=3):
        ups = every_up if gated else every_up[:1]
        biases = (every_bias if biased else [None, None])[: len(ups)]
        bias = last if biased else None
        operands = [x, *ups, down, *([*biases, bias] if biased else [])]
        given = [w if turned else w.t() for w in (*ups, down)]
        found = OPERATOR(
            x, given[:-1], biases, given[-1], bias, [turned] * len(given), chunks,
            GATED if gated else PLAIN,
        )  # fmt: skip
        whole = _whole(x, ups, biases, down, bias, gated)
        pairs = zip(_gradients(whole, operands), _gradients(found, operands), strict=True)
        for expected, one in pairs:
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def test_one_weight_may_hold_both_products():
    x, ups, biases, down, bias = _operands(torch.float64)
    parts = [["part", [{"value": 0}, i, 2], {}] for i in range(2)]
    steps = [*parts, ["aten.silu.default", [{"value": 1}], {}]]
    steps += [["aten.mul.Tensor", [{"value": 3}, {"value": 2}], {}]]
    given = [torch.cat(ups)], [torch.cat(biases)], down, bias, [True, True], 5
    found = OPERATOR(x, *given, json.dumps(steps))
    operands = [x, *ups, *biases, down, bias]
    whole = _whole(x, ups, biases, down, bias, gated=True)
    pairs = zip(_gradients(whole, operands), _gradients(found, operands), strict=True)
    for expected, one in pairs:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def test_a_product_that_a_comparison_reads_gets_no_gradient():
    x, ups, _, down, _ = _operands(torch.float64)
    steps = [["aten.gt.Scalar", [{"value": 0}, 0.0], {}]]
    steps += [["aten.mul.Tensor", [{"value": 1}, {"value": 2}], {}]]
    operands = [x, ups[1], down]
    found = OPERATOR(x, ups, [None, None], down, None, [True] * 3, 5, json.dumps(steps))
    whole = F.linear(F.linear(x, ups[1]) * (F.linear(x, ups[0]) > 0), down)
    pairs = zip(_gradients(whole, operands), _gradients(found, operands), strict=True)
    for expected, one in pairs:
        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)


def test_sums_of_narrow_gradients_are_rounded_once():
    x, ups, _, down, _ = _operands(torch.bfloat16)
    given = [None, None], down, None, [True] * 3
    chunked = _gradients(OPERATOR(x, ups, *given, 12, GATED), [x, *ups, down])
    whole = _gradients(_whole(x, ups, [None, None], down, None, True), [x, *ups, down])
    for expected, found in zip(whole, chunked, strict=True):
        assert found.dtype == expected.dtype
    torch.testing.assert_close(chunked[0], whole[0], rtol=2**-7, atol=0)
    for expected, found in zip(whole[2:], chunked[2:], strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_frozen_operands_get_no_gradient():
    x, ups, biases, down, bias = (
        [w.detach() for w in one] if isinstance(one, list) else one.detach()
        for one in _operands(torch.float64)
    )
    found = OPERATOR(x, ups, biases, down.requires_grad_(), bias, [True] * 3, 3, GATED)
    found.sum().backward()
    assert down.grad is not None and x.grad is None and bias.grad is None
    x.requires_grad_()
    down = down.detach()
    OPERATOR(x, ups, biases, down, bias, [True] * 3, 3, GATED).sum().backward()
    assert x.grad is not None and down.grad is None


def test_tensors_of_inner_width_exist_for_one_chunk():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Widest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            shape = made.shape if isinstance(made, torch.Tensor) else ()
            if len(shape) == 2 and shape[1] == INNER and shape[0] != WIDTH:  # but for the weight's
                self.most = max(self.most, shape[0])
            return made

    x, ups, _, down, _ = _operands(torch.float64)
    with Widest() as seen:
        OPERATOR(x, ups, [None, None], down, None, [True] * 3, 6, GATED).sum().backward()
    assert seen.most == 2, "12 rows in 6 chunks"


def test_second_derivatives_are_refused():
    x, ups, _, down, _ = _operands(torch.float64)
    found = OPERATOR(x, ups, [None, None], down, None, [True] * 3, 2, GATED).sum()
    with pytest.raises(RuntimeError, match="an MLP in chunks has no second derivative"):
        torch.autograd.grad(found, x, create_graph=True)
