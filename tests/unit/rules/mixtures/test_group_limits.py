"""Groups of experts in which a router chooses those of a token."""

import pytest
import torch
from torch import nn

from shardwright.rules.mixtures.group_limits import ANY, GroupLimit, group_limit
from shardwright.tracing.capture import capture_call
from tests.harness.operator_calls import GATED
from tests.ranks.test_experts import deepseek
from tests.ranks.test_wide import qwen3_moe

EXPERTS, WIDTH = 8, 6


class Mixture(nn.Module):
    """Tokens choose two of eight experts, in the groups that `limited` leaves."""

    def __init__(self, limited):
        super().__init__()
        self.limited = limited
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 14, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 7))

    def forward(self, x):
        scores = self.limited(self.gate(x).sigmoid())
        weights, chosen = scores.topk(2, dim=-1)
        product = "transformers.grouped_mm_fallback.default"
        found = torch.ops.shardwright.experts(
            x, chosen, weights, self.up, self.down, [True, True], product, GATED
        )
        return found.square().mean()


def by_where(scores):
    """A mask of booleans, of the three best of four groups."""
    groups = scores.view(-1, 4, 2).amax(-1)
    best = groups.topk(3, dim=-1).indices
    mask = torch.zeros_like(groups).scatter(1, best, 1.0).bool()
    return torch.where(mask.repeat_interleave(2, dim=1), scores, -1.0)


def by_one_group(scores):
    """The mask of a single group, which limits nothing."""
    best = scores.amax(-1, keepdim=True).topk(1, dim=-1).indices
    mask = torch.zeros(len(scores), 1).scatter(1, best, 1.0).bool()
    return scores.masked_fill(~mask.expand(-1, EXPERTS), 0.0)


def limit_of(model, kwargs, args=()):
    graph = capture_call(model, args, kwargs).graph
    op = next(op for op in graph.ops if op.kind == "experts")
    return group_limit(op, graph)


@pytest.mark.parametrize(
    "limited, expected",
    [(by_where, GroupLimit(4, 3)), (by_one_group, ANY), (lambda scores: scores, ANY)],
)
def test_groups_are_those_of_a_scattered_mask(limited, expected):
    assert limit_of(Mixture(limited), {}, (torch.randn(5, WIDTH),)) == expected


@pytest.mark.hf
@pytest.mark.parametrize("make, expected", [(deepseek, GroupLimit(2, 1)), (qwen3_moe, ANY)])
def test_routers_of_transformers(make, expected):
    assert limit_of(*make()) == expected
