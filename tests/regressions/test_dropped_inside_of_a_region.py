"""A weight's copy that the backward pass makes again, by a region that is fused with its reader.

Learned queries that are expanded over the batch (BLIP-2, detectors) are gathered in one region and
read in the next. The two were fused, and the copy was looked up among the inputs of the whole:
planning ended in a KeyError.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.layout import Mesh
from tests.zoo.assignments import chosen_plan
from tests.zoo.subject import Subject

WIDTH = 24


class Queries(nn.Module):
    """Learned queries that attend to a batch."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.norm, self.query = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.norm(self.queries.expand(x.shape[0], -1, -1))
        query, key = self.query(q).unsqueeze(1), self.key(x).unsqueeze(1)
        q = q + F.scaled_dot_product_attention(query, key, x.unsqueeze(1)).squeeze(1)
        return q.square().mean()


@pytest.mark.parametrize("mesh", ["a=2", "a=2 b=2"])
def test_queries_that_are_expanded_over_the_batch_are_planned(mesh):
    torch.manual_seed(0)
    one = Subject(Queries(), {"x": torch.randn(4, 6, WIDTH)})
    assert chosen_plan(one, Mesh.parse(mesh)).chosen
