"""Some micro-batches of a plan without stages stand for all; plans share what is equal."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower import plan_lowering
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.rules.analysis import analyze
from tests.harness.peak_memory import predicted


class Tokens(nn.Module):
    """A wide table of words at the start, whose gradients are reduced in the next micro-batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(512, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 512)

    def forward(self, ids):
        return self.head(torch.tanh(self.inner(self.embed(ids)))).logsumexp(-1).mean()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_some_micro_batches_need_the_memory_of_all(count, monkeypatch):
    graph = sw.capture(Tokens(), (torch.randint(512, (16, 4)),))
    analysis = analyze(graph)
    decisions = read_plan(sw.price(graph, "2xcpu", f"dp_shard=2 mb={count}"), graph, analysis)
    some = PlanLowering(graph, analysis, decisions, None).numbers
    assert some == tuple(sorted({*range(min(count, 3)), count - 1}))
    found = predicted(graph, analysis, decisions).peak
    monkeypatch.setattr(PlanLowering, "numbers", property(lambda self: tuple(range(count))))
    # Each micro-batch that is left out has a loss and the gradient of it.
    losses = 8 * (count - len(some))
    assert predicted(graph, analysis, decisions).peak == pytest.approx(found, abs=losses)


@pytest.mark.parametrize("strategy", ["dp_shard=2", "dp_shard=2 mb=4"])
def test_lowerings_that_share_all_but_the_gathers_ahead(strategy, monkeypatch):
    graph = sw.capture(Tokens(), (torch.randint(512, (16, 4)),))
    analysis = analyze(graph)
    plan = sw.price(graph, "2xcpu", strategy)
    decisions = {n: read_plan(replace(plan, ahead=n), graph, analysis) for n in (1, 3)}
    alone = {n: PlanLowering(graph, analysis, decisions[n], None).program(0) for n in (1, 3)}
    assert alone[1] != alone[3]
    first = PlanLowering(graph, analysis, decisions[1], None)
    assert first.program(0) == alone[1]
    monkeypatch.setattr(plan_lowering, "lower_step", None)  # it is not called again
    assert first.with_ahead(3).program(0) == alone[3]
