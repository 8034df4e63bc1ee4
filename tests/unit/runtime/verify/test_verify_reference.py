"""Notes on what is compared in place of a plan's own numerics, and what is not compared."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.options.numerics import Numerics
from shardwright.ir.plan import PlanError
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


class KeepsWhole(nn.Module):
    """Decides on its input, so that it is kept whole, and computes in float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x.float() if x.sum() > 0 else x.float() * 2)


def test_a_module_kept_whole_that_does_not_run_in_float64_is_named():
    model = nn.Sequential(nn.Linear(4, 4), KeepsWhole())
    plan = sw.plan(model, (torch.ones(4, 4),), machine=sw.Machine.preset("1xcpu"))
    with pytest.raises(PlanError, match=r"kept whole \(1\) does not run: mat1 and mat2 must have"):
        sw.verify(model, plan, (torch.ones(4, 4),))
