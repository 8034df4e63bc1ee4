"""Notes on what is compared in place of a plan's own numerics, and what is not compared."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.options.numerics import Numerics
from shardwright.runtime.verify.verify_reference import notes
from tests.harness.graph_comparison import compared
from tests.harness.layered_graphs import residual_layers


@pytest.mark.parametrize(
    "given, begin",
    [
        ({}, []),
        ({"rng": "fast"}, ["rng='fast' draws"]),
        ({"precision": "bf16"}, ["precision='bf16' rounds"]),
        ({"batch_norm": "local", "precision": "bf16"}, ["precision='bf16'", "batch_norm='local'"]),
    ],
)
def test_only_numerics_that_make_plans_incomparable_have_a_note(given, begin):
    found = notes(replace(residual_layers(1), numerics=Numerics(**given)))
    assert len(found) == len(begin)
    assert all(note.startswith(words) for note, words in zip(found, begin, strict=True))


class DropsForNothing(nn.Module):
    """Draws numbers that nothing reads, which are no part of the graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        F.dropout(x, 0.5)
        return F.dropout(self.linear(x)[:, :1], 0.5).sum()


def test_a_module_that_draws_other_numbers_is_not_compared_in_one_line():
    found = compared(DropsForNothing().double(), {"x": torch.randn(3, 4).double()})
    assert not found.ok and found.not_compared == (
        "IncomparableError: the module drops out of (3, 4), its captured graph of 3 other elements;"
        " it may draw numbers that nothing reads"
    )
