"""Backward passes in two parts give what one gives, and multiply no matrix twice."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.program.step.region import Region
from shardwright.runtime.regions.split_calls import SplitCall

STATE = torch.empty(0)


def linears(x, a, b, c, d, state):
    for weight in (a, b, c, d):
        x = F.linear(x, weight).tanh()
    return (x,)


def normed(x, a, b, c, d, state):
    return (F.linear(F.layer_norm(F.linear(x, a), (6,), b[0], c[0]), d),)


def read_twice(x, a, b, c, d, state):
    x = F.linear(F.linear(x, a), b) + F.linear(x, c)
    return F.linear(x, a), F.linear(x, d).relu()


def computed_alone(x, a, b, c, d, state):
    """`a @ b` depends on weights alone, and `c` is read in one result that `x` does not reach."""
    return F.linear(x, a @ b), F.linear(x * d[0], d), c.sum()


def region(outputs):
    names = tuple(f"in{i}" for i in range(5))
    made = tuple(f"v{i}" for i in range(outputs))
    return Region(((),), names, made, (True,) * 5, (True,) * outputs, (False,) * 5)


def tensors():
    draw = torch.Generator().manual_seed(0)
    shapes = [(4, 6)] + [(6, 6)] * 4
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]


def whole(function, given):
    leaves = [x.clone().requires_grad_() for x in given]
    results = function(*leaves, STATE)
    ones = [torch.ones_like(x) for x in results]
    return torch.autograd.grad(results, leaves, ones, allow_unused=True)


def split(function, given, weights):
    count = len(function(*given, STATE))
    call = SplitCall(region(count), function, weights)
    results = call.forward(given, STATE)
    assert not any(x.requires_grad for x in results)
    inputs = call.backward_to_inputs([torch.ones_like(x) for x in results], {})
    return inputs, call.backward_to_weights({})


@pytest.mark.parametrize("function", [linears, normed, read_twice, computed_alone])
@pytest.mark.parametrize("weights", [(1, 2, 3, 4), (2, 4), (0, 1, 2, 3, 4), ()])
def test_parts_are_the_whole(function, weights):
    given = tensors()
    inputs, found = split(function, given, weights)
    for i, expected in enumerate(whole(function, given)):
        gradient, other = (found[i], inputs[i]) if i in weights else (inputs[i], found[i])
        assert other is None
        if expected is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_no_product_is_computed_twice():
    given = tensors()
    call = SplitCall(region(1), linears, (1, 2, 3, 4))
    results = call.forward(given, STATE)
    product = 2 * 4 * 6 * 6
    with FlopCounterMode(display=False) as counted:
        call.backward_to_inputs([torch.ones_like(x) for x in results], {})
    assert counted.get_total_flops() == 4 * product
    with FlopCounterMode(display=False) as counted:
        call.backward_to_weights({})
    assert counted.get_total_flops() == 4 * product


def test_a_gradient_that_is_missing_stays_so():
    call = SplitCall(region(2), read_twice, (1, 2, 3, 4))
    first, _ = call.forward(tensors(), STATE)
    inputs = call.backward_to_inputs([torch.ones_like(first), None], {})
    weights = call.backward_to_weights({})
    assert inputs[0] is not None
    assert weights[1] is not None and weights[4] is None
