"""Tensors that slices fill are concatenated; others are assigned to as they were."""

import pytest
import torch
from torch import nn

from shardwright.tracing.capture import capture_call
from tests.harness.graph_comparison import compared

WIDTH = 6


class Heads(nn.Module):
    """Two parts of each head, assigned to slices of `allocated`."""

    def __init__(self, assign, allocate):
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)
        self.assign, self.allocate = assign, allocate

    def forward(self, x):
        found = self.allocate(self.linear(x))
        self.assign(found, self.linear(x), x)
        return found.sin()


def halves(found, y, x):
    found[..., :WIDTH] = y
    found[..., WIDTH:] = x[..., :1]


def backwards(found, y, x):
    found[..., -2:] = x[..., :2]
    found[..., :-2] = y


def of_rows(found, y, x):
    found[:1] = torch.cat([y, x[..., :2]], -1)[:1]
    found[1:] = torch.cat([x[..., 2:], y], -1)[1:]


def overlapping(found, y, x):
    found[..., :WIDTH] = y
    found[..., 4:] = x


def with_a_gap(found, y, x):
    found[..., :4] = x
    found[..., 6:] = y[..., :2]


def every_second(found, y, x):
    found[..., ::2] = x
    found[..., 1::2] = y[..., :4]


def of_two_dimensions(found, y, x):
    found[..., :WIDTH] = y
    found[:1] = 1.0
    found[..., WIDTH:] = x[..., :2]


def allocated(y):
    return y.new_empty(*y.shape[:-1], 8)


def zeros(y):
    return y.new_zeros(*y.shape[:-1], 8)


def with_gradient(y):
    return torch.cat([y, y[..., :2]], -1)


def captured(assign, allocate):
    model = Heads(assign, allocate).double()
    graph = capture_call(model, (torch.ones(4, 5, 4).double(),)).graph
    return model, [op.kind for op in graph.ops]


@pytest.mark.parametrize("allocate", [allocated, zeros])
@pytest.mark.parametrize("assign", [halves, backwards, of_rows])
def test_slices_that_cover_a_tensor_once_are_concatenated(assign, allocate):
    model, kinds = captured(assign, allocate)
    assert "slice_scatter" not in kinds and {"empty", "zeros"}.isdisjoint(kinds)
    assert kinds[-2:] == ["cat", "sin"]
    assert compared(model, {"x": torch.randn(4, 5, 4).double()}).ok


@pytest.mark.parametrize("assign", [overlapping, with_a_gap, every_second, of_two_dimensions])
def test_other_assignments_stay(assign):
    _, kinds = captured(assign, zeros)
    assert "slice_scatter" in kinds and "zeros" in kinds


def test_what_is_assigned_over_keeps_its_gradient_of_zeros():
    _, kinds = captured(halves, with_gradient)
    assert "slice_scatter" in kinds
