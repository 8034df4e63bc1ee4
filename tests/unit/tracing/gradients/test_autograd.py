"""What is known to be kept for the backward pass is what autograd keeps."""

import pytest
import torch

from shardwright.tracing.gradients.autograd import observe

aten = torch.ops.aten


def facts(function, *shapes, grad=True):
    operands = [torch.empty(s, device="meta").requires_grad_(grad) for s in shapes]
    return observe(lambda given: [function(*given)], operands)


@pytest.mark.parametrize(
    "function, shapes, operands, results",
    [
        (aten.mm.default, [(5, 6), (6, 7)], (0, 1), ()),
        (aten.relu.default, [(5, 6)], (), (0,)),
        (aten.gelu.default, [(5, 6)], (0,), ()),
        (aten.exp.default, [(5, 6)], (), (0,)),
        (aten.add.Tensor, [(5, 6), (5, 6)], (), ()),
        (aten.mul.Tensor, [(5, 6), (6,)], (0, 1), ()),
        (aten.neg.default, [(5, 6)], (), ()),
    ],
)
def test_what_an_operator_keeps(function, shapes, operands, results):
    found = facts(function, *shapes)
    assert found.requires_grad == (True,)
    assert found.saved_operands == operands
    assert found.saved_results == results
    assert found.alias_of == (-1,)
    assert found.extra_saved == 0


def test_nothing_is_kept_where_no_gradient_flows():
    found = facts(aten.mm.default, (5, 6), (6, 7), grad=False)
    assert found.requires_grad == (False,)
    assert found.saved_operands == found.saved_results == ()


def test_a_view_is_an_alias_and_keeps_nothing():
    found = facts(lambda x: x.view(3, 10), (5, 6))
    assert found.alias_of == (0,)
    assert found.saved_operands == found.saved_results == ()


def test_what_is_kept_besides_is_counted_in_bytes():
    found = facts(lambda x: torch.nn.functional.layer_norm(x, (6,)), (5, 6))
    assert found.saved_operands == (0,)
    assert found.extra_saved == 2 * 5 * 4  # mean and inverse deviation of each row


def test_several_results_each_know_whether_a_gradient_flows():
    operands = [torch.empty(5, 6, device="meta").requires_grad_()]
    found = observe(lambda given: list(aten.max.dim(given[0], 1)), operands)
    assert found.requires_grad == (True, False)
    assert found.saved_results == (1,)
