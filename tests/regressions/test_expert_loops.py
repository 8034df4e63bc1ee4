"""Loops over experts that pick rows by data, as transformers wrote Mixtral before version 5."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.tracing.call import CaptureError

WIDTH, EXPERTS = 4, 3


class LoopedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])

    def forward(self, states):
        rows = states.view(-1, WIDTH)
        scores, chosen = torch.topk(self.gate(rows).softmax(1), 2, dim=-1)
        final = torch.zeros_like(rows)
        mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            place, token = torch.where(mask[number])
            some = rows[None, token].reshape(-1, WIDTH)
            final.index_add_(0, token, expert(some) * scores[token, place, None])
        return final.reshape(states.shape)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList([LoopedExperts(), LoopedExperts()])

    def forward(self, x):
        states = self.first(x)
        for mixture in self.mixtures:
            states = states + mixture(states)
        return states.square().sum()


def test_a_loop_over_experts_is_kept_whole_and_trains_as_the_module():
    torch.manual_seed(0)
    model, x = Layers().double(), torch.randn(4, 5, WIDTH, dtype=torch.float64)
    plan = sw.plan(model, (x,), machine="1xcpu")
    (note,) = (note for note in plan.notes if "kept whole" in note)
    assert note.startswith(
        "mixtures.0, mixtures.1 (LoopedExperts) kept whole and computed by every"
    )
    assert "test_expert_loops.py:26: aten.where.default gives" in note
    parallel = sw.parallelize(model, plan)
    loss = parallel(x)
    loss.backward()
    expected = model(x)
    expected.backward()
    assert torch.equal(loss, expected)
    own = dict(model.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert torch.equal(parameter.grad, own[name].grad), name


def test_in_the_model_itself_or_without_weights_the_line_is_named():
    line = r"test_expert_loops\.py:26\): aten\.where\.default gives"
    with pytest.raises(CaptureError, match=line):
        sw.capture(LoopedExperts(), args=(torch.randn(4, 5, WIDTH),))
    with torch.device("meta"):
        model, x = Layers(), torch.randn(4, 5, WIDTH)
    with pytest.raises(CaptureError, match=f"{line}.*build the model with weights"):
        sw.capture(model, args=(x,))
