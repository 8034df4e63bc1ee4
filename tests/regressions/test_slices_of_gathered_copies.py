"""Slices of a parameter that is gathered again, read by operators between other gathers.

A slice went into the next region as an input of its own. There it was saved as a place in what was
given, and the backward pass looked that place up from the beginning of the new copy: it computed
with the first slice instead of the second, and gradients before it were wrong.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Layout, Mesh
from shardwright.program.decisions import Decisions
from shardwright.rules.rule import Split
from shardwright.runtime.module_options import ModuleOptions
from shardwright.runtime.parallel_module import ParallelModule
from tests.harness.ranks import run_ranks
from tests.zoo.subject import Subject, worst

pytestmark = pytest.mark.ranks
BATCH = 6


class Halves(nn.Module):
    """Two products with the halves of one matrix, and a layer between them."""

    def __init__(self):
        super().__init__()
        self.both = nn.Parameter(torch.randn(16, 8))
        self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        first, second = self.both[:8], self.both[8:]
        x = self.between(F.linear(x, first)).tanh()
        return self.last(F.linear(x, second)).square().mean()


def on_two_ranks(one, expected):
    mesh = Mesh.parse("a=2")
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    names = [leaf.name for leaf in one.graph.leaves_of(LeafKind.PARAMETER)]
    for split in (False, True):  # whether each rank has half of the batch
        batch = {
            op.name: [f.name for f in one.analysis.rules[op.name].factors if f.size == BATCH]
            for op in one.graph.ops
        }
        decisions = Decisions(
            mesh,
            {name: (Split(f[0]) if split and f else None,) for name, f in batch.items()},
            {name: Layout.parse("a:S(0)", mesh) for name in names},
            frozenset(names),
        )
        options = ModuleOptions(one.weights, one.buffers, seed=3, training=True)
        module = ParallelModule(one.captured, one.analysis, decisions, options, device_mesh)
        error, where = worst(expected, one.run(module))
        assert error < 1e-12, (split, where)


def test_the_second_half_of_a_matrix_is_not_the_first():
    torch.manual_seed(0)
    one = Subject(Halves(), {"x": torch.randn(BATCH, 8)})
    run_ranks(2, on_two_ranks, one, one.run(one.one_device()))
