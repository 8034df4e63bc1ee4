"""Decomposition operator by operator gives the graph that decomposing the whole program gives."""

import pytest
import torch
from torch import nn

from shardwright.tracing.capture import capture_call
from shardwright.tracing.decompose import cached_decompositions
from shardwright.tracing.export import export
from tests.harness import models
from tests.zoo import ZOO

OFTEN = ("bert", "clip", "lstm lm")


def _both_ways(monkeypatch, model, batch):
    asked = []

    def spied(program, table):
        found = export_alone(program, table)
        asked.append(found is not None)
        return found

    export_alone = export.decomposed
    monkeypatch.setattr(cached_decompositions, "_WORTH", 0.0)
    monkeypatch.setattr(export, "decomposed", spied)
    alone = capture_call(model, (), batch)
    monkeypatch.setattr(export, "decomposed", lambda program, table: None)
    return alone, capture_call(model, (), batch), asked


@pytest.mark.parametrize("name", OFTEN)
def test_models_of_the_zoo_give_one_graph(monkeypatch, name):
    with torch.device("meta"):
        model, batch = ZOO[name](False)
    alone, whole, asked = _both_ways(monkeypatch, model, batch)
    assert alone.graph == whole.graph
    assert asked == [True], "nothing in it writes in place, so nothing is decomposed as a whole"


@pytest.mark.parametrize("make", [models.traps, models.cnn, models.gpt2])
def test_real_models_give_one_graph(monkeypatch, make):
    alone, whole, _ = _both_ways(monkeypatch, *make())
    assert alone.graph == whole.graph


class _Writes(nn.Module):
    """Writes to tensors that it makes, one of which `reads` reads before."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.linear = reads, nn.Linear(4, 4)

    def forward(self, x):
        order = self.linear(x).sum(0).argsort()
        back, rows = torch.empty_like(order), x.new_zeros(4, 4)
        before = self.reads(rows)
        back[order] = torch.arange(4)
        rows.index_add_(0, order, self.linear(x)[:4])
        rows.scatter_add_(1, order.expand(4, 4), x[:4])
        return (rows[back].exp() + before.sum()).sum()


@pytest.mark.parametrize(
    "reads, replaced",
    [(lambda rows: rows.new_zeros(4), True), (torch.sum, True), (torch.ravel, False)],
)
def test_writes_to_new_tensors_are_operators_as_others(monkeypatch, reads, replaced):
    alone, whole, asked = _both_ways(monkeypatch, _Writes(reads), {"x": torch.rand(5, 4)})
    assert alone.graph == whole.graph
    assert asked == [replaced]


def _shifted(x):
    """Labels as T5 and BART shift them."""
    x = x.detach().long()
    made = x.new_zeros(x.shape)
    made[..., 1:] = x[..., :-1].clone()
    made[..., 0] = 3
    made.masked_fill_(made == -100, 0)
    return made


def _rotated(x):
    """A query as DeepSeek-V3 puts it together, of tensors that have gradients."""
    made = x.new_empty(x.shape)
    made[..., :2] = x[..., 2:] * 2
    made[..., 2:] = x[..., :2]
    return made


def _cast(x):
    """A part of another dtype."""
    made = x.new_zeros(x.shape)
    made[..., 1:3] = x[..., :2].double()
    return made


def _added(x):
    """A part that is read before it is written."""
    made = x * 2
    made[..., 1:].add_(1)
    return made


def _marked(x):
    """Groups of experts that a router chooses."""
    rows = torch.zeros_like(x)
    rows.scatter_(1, x.topk(2)[1], 1)
    return rows


def _read_later(x):
    """A view that reads what is written to the tensor after it was made."""
    made = x.new_zeros(x.shape)
    part = made[..., 1:]
    part[...] = x[..., 1:]
    made[..., 0] = 3
    return made * part.sum()


def _crossed(x):
    """Views of one tensor that are both made before either is written to."""
    x = x.detach()
    made = x.new_zeros(x.shape)
    one, other = made[..., 1:], made[..., :2]
    one.copy_(x[..., 1:])
    other.copy_(x[..., :2])
    return made


class _WritesParts(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.linear = make, nn.Linear(4, 4)

    def forward(self, x):
        return (self.make(self.linear(x)) * self.linear(x)).sum()


@pytest.mark.parametrize("make", [_shifted, _rotated, _cast, _added, _marked])
def test_writes_to_parts_of_new_tensors_are_operators_as_others(monkeypatch, make):
    alone, whole, asked = _both_ways(monkeypatch, _WritesParts(make), {"x": torch.rand(5, 4)})
    assert alone.graph == whole.graph
    assert asked == [True]


@pytest.mark.parametrize("make", [_read_later, _crossed])
def test_parts_that_other_views_read_are_decomposed_as_a_whole(monkeypatch, make):
    alone, whole, asked = _both_ways(monkeypatch, _WritesParts(make), {"x": torch.rand(5, 4)})
    assert alone.graph == whole.graph
    assert asked == [False]


class _Divides(nn.Module):
    """Divides what it makes in place, by a tensor of `dtype`, as experts' weights by their sum."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.linear = dtype, nn.Linear(4, 4)

    def forward(self, x):
        weights, _ = self.linear(x).softmax(-1).topk(2)
        weights /= weights.sum(-1, keepdim=True).to(self.dtype)
        return (weights * weights).sum()


@pytest.mark.parametrize("dtype, replaced", [(torch.float32, True), (torch.float64, False)])
def test_what_is_divided_in_place_keeps_its_dtype(monkeypatch, dtype, replaced):
    alone, whole, asked = _both_ways(monkeypatch, _Divides(dtype), {"x": torch.rand(5, 4)})
    assert alone.graph == whole.graph
    assert asked == [replaced]


def test_what_does_not_repeat_is_decomposed_as_a_whole(monkeypatch):
    asked = []
    monkeypatch.setattr(
        cached_decompositions, "_expansions", lambda calls, table: asked.append(len(calls))
    )
    capture_call(*_mlp(1))
    assert not asked
    capture_call(*_mlp(40))
    assert asked == [1], "a linear layer; its activation is of Core ATen and stays"


def _mlp(layers):
    blocks = [module for _ in range(layers) for module in (nn.Linear(4, 4), nn.GELU())]
    return nn.Sequential(*blocks), (torch.zeros(3, 4),)


class Writes(nn.Module):
    """Writes through a view of what another operator reads."""

    def forward(self, x):
        y = x * 2
        y.t()[0].add_(1)
        return (y * x).sum()


def test_a_program_that_writes_is_decomposed_as_a_whole(monkeypatch):
    alone, whole, asked = _both_ways(monkeypatch, Writes(), {"x": torch.zeros(3, 4)})
    assert alone.graph == whole.graph
    assert asked == [False]
    assert any(op.kind in ("slice_scatter", "select_scatter") for op in alone.graph.ops)
