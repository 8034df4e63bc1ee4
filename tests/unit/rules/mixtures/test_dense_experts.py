"""Experts that all compute every token are found in the forms that models have, and told of."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.strategy.recompute import StrategyError
from shardwright.rules.mixtures.dense_experts import DenseExperts, dense_experts, dense_experts_note

EXPERTS, WIDTH, INNER = 4, 8, 12


class Experts(nn.Module):
    """All experts of Llama-4 or GPT-OSS, which scale tokens before or behind the products.

    Their scores are a half where an expert is not chosen, so that all have to be computed.
    """

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))

    def forward(self, x, scores):
        if self.form == "einsum":
            inner = torch.einsum("td,edf->etf", x, self.up).relu()
            return torch.einsum("etf,efd,te->td", inner, self.down, scores)
        every = x.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH)
        if self.form == "before":
            every = every * scores.t()[..., None]
        found = torch.bmm(torch.bmm(every, self.up).relu(), self.down)
        if self.form == "behind":
            found = found * scores.t()[..., None]
        return found.sum(0)


class Layer(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(form)
        self.heads = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        scores = self.router(x)
        top, chosen = scores.topk(2, dim=-1)
        found = self.experts(x, torch.zeros_like(scores).scatter(1, chosen, top).sigmoid())
        few = torch.bmm(x[:8].view(EXPERTS, 2, WIDTH), self.heads)  # other rows for each weight
        return found.square().mean(1, keepdim=True) + few.square().mean()


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layers = nn.ModuleList([Layer(form), Layer(form)])

    def forward(self, x):
        return sum(layer(x) for layer in self.layers).mean()


@pytest.mark.parametrize("form", ["before", "behind", "einsum"])
def test_all_forms_are_found_once_a_layer(form):
    graph = sw.capture(Model(form), kwargs={"x": torch.randn(32, WIDTH)})
    assert dense_experts(graph) == [
        DenseExperts(f"layers.{i}.experts", EXPERTS, 2) for i in range(2)
    ]


def test_layers_that_mixtures_replaced_have_a_note_of_their_own():
    graph = sw.capture(Model("before"), kwargs={"x": torch.randn(32, WIDTH)})
    left = dense_experts(graph)
    gone = [DenseExperts(f"blocks.{i}.experts", 8, 1) for i in range(3)]
    note = dense_experts_note(graph, [*gone, *left])
    assert note.startswith(
        "8 experts of blocks.0.experts and 2 more are computed only for the tokens that chose them"
    )
    assert note.endswith(f"; {dense_experts_note(graph)}")


def test_plans_say_it_and_expert_parallelism_is_refused_with_it():
    graph = sw.capture(Model("before"), kwargs={"x": torch.randn(32, WIDTH)})
    note = dense_experts_note(graph)
    assert note.startswith("all 4 experts of layers.0.experts and 1 more compute every token")
    assert "2 of 4 are chosen: ep has nothing to send" in note
    plan = sw.price(graph, "2xcpu", "dp_shard=2")
    assert note in plan.notes
    assert "compute every token" in plan.explain().replace("\n", " ")
    with pytest.raises(StrategyError, match="ep=2 splits experts, and all 4 experts"):
        sw.price(graph, "2xcpu", "dp_shard=2 ep=2")


def test_other_models_say_nothing():
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    graph = sw.capture(attention, args=(torch.randn(2, 4, 8),))
    assert dense_experts(graph) == [] and dense_experts_note(graph) == "" == graph.note
