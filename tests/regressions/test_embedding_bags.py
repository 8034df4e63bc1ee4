"""Bags of embeddings, which every device looked up whole.

`F.embedding_bag` makes one row of all its bags before it calls an operator, and no experiment
found a split of that: the table, often most of a model, lay whole on every device. Now bags, the
width and, in sums and means, the table's rows are split; in
sums the look-ups of a bag too.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness.graph_comparison import compared
from tests.harness.small_graphs import splittable
from tests.harness.uneven_tiles import check_on_two_ranks
from tests.zoo.subject import Subject

_generator = torch.Generator().manual_seed(0)
BAGS = torch.randint(0, 11, (5, 6), generator=_generator)
ROW = {"x": BAGS[0], "offsets": torch.tensor([0, 2, 2])}


class Bags(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.table, self.how = nn.EmbeddingBag(11, 7, **how), how
        values = torch.randn(11, 7, generator=torch.Generator().manual_seed(1))
        self.table.weight = nn.Parameter(values)

    def forward(self, x, offsets=None):
        found = self.table(x, offsets)
        return (found * torch.arange(1.0, found.numel() + 1).view(found.shape)).sum()


class Weighted(Bags):
    def __init__(self):
        super().__init__(mode="sum", padding_idx=3)
        self.scale = nn.Parameter(torch.randn(5, 6, generator=torch.Generator().manual_seed(2)))

    def forward(self, x):
        return F.embedding_bag(
            x, self.table.weight, mode="sum", padding_idx=-8, per_sample_weights=self.scale
        ).sin().sum()  # fmt: skip


CASES = {
    "mean": (Bags(), {"x": BAGS}, {5, 7, 11}),
    "sum, padded": (Bags(mode="sum", padding_idx=3), {"x": BAGS}, {5, 6, 7, 11}),
    "mean, padded": (Bags(mode="mean", padding_idx=3), {"x": BAGS}, {5, 7, 11}),
    "max, padded": (Bags(mode="max", padding_idx=3), {"x": BAGS}, {5, 7}),
    "weighted": (Weighted(), {"x": BAGS}, {5, 6, 7, 11}),
    "scaled": (Bags(mode="mean", scale_grad_by_freq=True), {"x": BAGS}, {7}),
    "by offsets": (Bags(mode="mean", padding_idx=3), ROW, {7, 11}),
}


@pytest.mark.parametrize("name", CASES)
def test_bags_are_split_and_are_those_of_the_module(name):
    model, batch, sizes = CASES[name]
    one = Subject(model, batch)
    (op,) = (op for op in one.graph.ops if op.kind == "embedding_bags")
    rule = one.analysis.rules[op.name]
    assert {rule.factor[factor].size for factor in splittable(rule)} == sizes
    assert compared(model, batch).ok


@pytest.mark.ranks
def test_uneven_tiles_on_two_ranks_give_what_one_device_gives():
    check_on_two_ranks({name: Subject(model, batch) for name, (model, batch, _) in CASES.items()})


def test_what_torch_refuses_is_refused_in_its_words():
    with pytest.raises(Exception, match="per_sample_weights is only supported for mode='sum'"):
        Subject(_Wrong(), {"x": BAGS})


class _Wrong(Weighted):
    def forward(self, x):
        return F.embedding_bag(x, self.table.weight, per_sample_weights=self.scale).sum()
