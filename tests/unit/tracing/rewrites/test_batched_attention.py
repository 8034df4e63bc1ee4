"""Calls of attention for equal parts of a sequence are one call over a batch; others stay."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from shardwright.planner.strategies.dimensions import batch_atoms
from shardwright.rules.analysis import analyze
from shardwright.tracing.capture import capture_call
from tests.harness.graph_comparison import compared

HEADS, WIDTH = 3, 4


class Windows(nn.Module):
    """Attention in each piece of all rows, whose results are joined in `order`."""

    def __init__(self, lengths, order=None, causal=False, masked=False):
        super().__init__()
        self.linear = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.lengths, self.order = list(lengths), order or range(len(lengths))
        self.causal, self.masked = causal, masked

    def forward(self, x):
        rows = self.linear(x).view(-1, HEADS, WIDTH).transpose(0, 1).unsqueeze(0)
        parts = (torch.split(t, self.lengths, dim=2) for t in (rows, rows.sin(), rows.cos()))
        found = []
        for q, k, v in zip(*parts, strict=True):
            mask = q.new_zeros(q.shape[2], q.shape[2]) if self.masked else None
            one = scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal, scale=0.5)
            found.append(one.transpose(1, 2))
        return torch.cat([found[i] for i in self.order], 1).reshape(-1, HEADS * WIDTH)


def captured(model):
    rows = sum(model.lengths)
    model, x = model.double(), torch.randn(rows, HEADS * WIDTH, dtype=torch.float64)
    graph = capture_call(model, (x,)).graph
    return graph, [op for op in graph.ops if "attention" in op.kind], compared(model, {"x": x})


@pytest.mark.parametrize("causal", [False, True])
def test_equal_parts_are_a_batch(causal):
    graph, calls, same = captured(Windows([5] * 4, causal=causal))
    assert same.ok
    (call,) = calls
    assert [graph.tensor[name].shape for name in call.operands] == [(4, HEADS, 5, WIDTH)] * 3
    assert {"split_with_sizes", "split", "cat"}.isdisjoint(op.kind for op in graph.ops)
    assert [name for name in call.saves if name not in (*call.operands, *call.outputs)] == []


@pytest.mark.parametrize(
    "model",
    [Windows([5, 5, 4]), Windows([5, 5, 5], order=[1, 0, 2]), Windows([5, 5], masked=True)],
    ids=["unequal", "in another order", "masked"],
)
def test_other_parts_stay(model):
    _, calls, same = captured(model)
    assert same.ok and len(calls) == len(model.lengths)


class Reordered(nn.Module):
    """A product of rows in another order, which is constant."""

    def __init__(self, order):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("order", torch.tensor(order))

    def forward(self, x):
        return self.linear(x[self.order])


@pytest.mark.parametrize(("order", "known"), [([2, 0, 3, 1], True), ([2, 0, 3], False)])
def test_rows_of_the_batch_in_another_order_are_the_batch(order, known):
    graph = capture_call(Reordered(order), (torch.randn(4, 6),)).graph
    analysis = analyze(graph)
    atom = analysis.dims[graph.outputs[0]][0][0]
    assert (atom in batch_atoms(graph, analysis)) == known
