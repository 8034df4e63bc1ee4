"""Masks that say nothing but "causal" become the flag, and those that allow all are left out."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.graph import argument
from shardwright.tracing.capture import capture_call
from shardwright.tracing.rewrites import constant_masks
from tests.harness import models

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


def attention_of(allowed):
    graph = capture_call(Masked(allowed), (torch.ones(2, 3, LENGTH, 4),)).graph
    (op,) = (op for op in graph.ops if op.kind == "scaled_dot_product_attention")
    return op


def flagged(allowed):
    return bool(argument(attention_of(allowed), 5, "is_causal", False))


@pytest.fixture(params=["whole", "in parts"])
def size(request, monkeypatch):
    if request.param == "in parts":
        monkeypatch.setattr(constant_masks, "_LARGEST_MASK", LENGTH)
        monkeypatch.setattr(constant_masks, "_LARGEST_PART", 8 * LENGTH)


def sequences():
    """0 and 1: which of two sequences it is, along the batch."""
    return torch.arange(2)[:, None, None, None]


@pytest.mark.parametrize(
    "allowed",
    [
        lambda q, k: k <= q,
        lambda q, k: (k <= q) & (k >= 0),
        lambda q, k: ~(k > q),
        lambda q, k: (k <= q) & ((q // 200) * sequences() == (k // 200) * sequences()),
    ],
)
def test_a_triangle_is_the_flag(allowed, size):
    assert flagged(allowed)


@pytest.mark.parametrize(
    "allowed",
    [
        lambda q, k: q >= 0,  # as transformers does for encoders
        lambda q, k: k >= 0,
        lambda q, k: (q[..., :1, :] == 0) & (k[..., :1] == 0),
        lambda q, k: q * 0.0 + k * 0.0,  # added to the scores
    ],
)
def test_a_mask_that_allows_everything_is_left_out(allowed, size):
    op = attention_of(allowed)
    assert len(op.operands) == 3 and not argument(op, 5, "is_causal", False)


@pytest.mark.parametrize(
    "allowed",
    [
        lambda q, k: (k <= q) | (q > k + 50) | (k - q < 80),  # all but one corner
        lambda q, k: (k >= 1).expand(1, 1, LENGTH, LENGTH),
        lambda q, k: torch.ones(1, 1, LENGTH, LENGTH),
        lambda q, k: k < 1,  # the first key alone, for every query
        lambda q, k: k < q,
        lambda q, k: k <= q + 1,
        lambda q, k: (k <= q) & (k > q - 90),  # a window
        lambda q, k: (k <= q) & (k // 40 == q // 40),  # documents
        lambda q, k: (k <= q) & ((q // 40) * sequences() == (k // 40) * sequences()),  # in one only
        lambda q, k: (k <= q) | (k < 3),  # a prefix
        lambda q, k: k >= q,
    ],
)
def test_anything_else_stays_a_mask(allowed, size):
    op = attention_of(allowed)
    assert len(op.operands) == 4 and not argument(op, 5, "is_causal", False)


@pytest.mark.hf
def test_without_a_cache_hugging_face_asks_for_the_same_attention():
    model, batch = models.llama(batch=3)
    graphs = [sw.capture(model, (), {**batch, "use_cache": cached}) for cached in (True, False)]
    assert [len(graph.ops) for graph in graphs] == [len(graphs[0].ops)] * 2
    flags = [
        argument(op, 5, "is_causal", False)
        for op in graphs[1].ops
        if op.kind == "scaled_dot_product_attention"
    ]
    assert flags and all(flags)
