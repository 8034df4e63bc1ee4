"""A training step of a parallel module beside one of the module itself."""

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.plan import PlanError


class Net(nn.Module):
    """The loss does not read `unread`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.unread = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).square().sum()


def test_a_step_leaves_no_gradient_of_before():
    """What is not trained is not updated either: weight decay would change it."""
    model = Net().double()
    alone, x = copy.deepcopy(model), torch.randn(5, 4, dtype=torch.float64)
    parallel = sw.parallelize(model, sw.plan(model, (x,), machine="1xcpu"))
    for module in (parallel, alone):
        for p in module.parameters():
            p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1)
    parallel.train_step(optimizer, (x,))
    other = torch.optim.AdamW(alone.parameters(), lr=0.1)
    other.zero_grad()
    alone(x).backward()
    other.step()
    expected = dict(alone.named_parameters())
    found = dict(parallel.named_parameters())
    assert found.keys() == expected.keys()
    for name, p in found.items():
        torch.testing.assert_close(p.detach(), expected[name].detach(), rtol=1e-12, atol=1e-14)
    assert found["unread.weight"].grad is None


@pytest.mark.hf
def test_a_model_of_transformers_shows_its_configuration():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **sizes))
    rows = torch.zeros(2, 8, dtype=torch.int64)
    given = {"input_ids": rows, "labels": rows}
    parallel = sw.parallelize(model, sw.plan(model, kwargs=given, machine="1xcpu"))
    assert parallel.config.n_embd == 16
    assert parallel.config is not model.config, "a change of it would be ignored"
    with pytest.raises(PlanError, match="config was another value"):
        parallel.config = model.config
