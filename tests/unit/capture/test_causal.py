"""Masks that say nothing but "causal" become the flag, however long the sequence is."""

import pytest
import torch
from torch import nn

from shardwright.capture import causal
from shardwright.capture.capture import capture_call
from shardwright.capture.operators import argument

LENGTH = 96


class Masked(nn.Module):
    def __init__(self, allowed):
        super().__init__()
        self.allowed = allowed

    def forward(self, x):
        places = torch.arange(LENGTH, device=x.device) + 0
        query, key = places[None, None, :, None], places[None, None, None, :]
        mask = self.allowed(query, key).expand(x.shape[0], 1, LENGTH, LENGTH)
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def flagged(allowed):
    graph = capture_call(Masked(allowed), (torch.ones(2, 3, LENGTH, 4),)).graph
    (op,) = (op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    return bool(argument(op, 5, "is_causal", False))


@pytest.fixture(params=["whole", "in parts"])
def size(request, monkeypatch):
    if request.param == "in parts":
        monkeypatch.setattr(causal, "_LARGEST_MASK", LENGTH)
        monkeypatch.setattr(causal, "_LARGEST_PART", 8 * LENGTH)


@pytest.mark.parametrize(
    "allowed",
    [lambda q, k: k <= q, lambda q, k: (k <= q) & (k >= 0), lambda q, k: ~(k > q)],
)
def test_a_triangle_is_the_flag(allowed, size):
    assert flagged(allowed)


@pytest.mark.parametrize(
    "allowed",
    [
        lambda q, k: k < q,
        lambda q, k: k <= q + 1,
        lambda q, k: (k <= q) & (k > q - 90),  # a window
        lambda q, k: (k <= q) & (k // 40 == q // 40),  # documents
        lambda q, k: (k <= q) | (k < 3),  # a prefix
        lambda q, k: k >= q,
    ],
)
def test_anything_else_stays_a_mask(allowed, size):
    assert not flagged(allowed)
