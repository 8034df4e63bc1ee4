"""Kernels that the compiler fuses: which operators, and what they cost less."""

import torch
from torch import nn

import shardwright as sw
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.fusion import fusions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + torch.tanh(self.down(torch.relu(self.up(x)) * 2) * 3)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * 2).sum()


def test_chains_of_a_layer_are_one_kernel_and_products_end_them():
    graph = sw.capture(Blocks(), (torch.zeros(4, 8),))
    found = fusions(graph, analyze(graph).rules)
    first = [op for op in graph.ops if op.source.module.startswith("layers.0") and op.name in found]
    # relu and its product are a kernel; so are the product, the tanh and the sum behind `down`.
    assert [op.kind for op in first] == ["relu", "mul", "mul", "tanh", "add"]
    assert [found[op.name].joins for op in first] == [False, True, False, True, True]
    relu, doubled, *_, added = (found[op.name] for op in first)
    assert relu.results == (True,) and doubled.operands == (True,) and doubled.results == (False,)
    assert added.operands == (False, True)  # what the layer is given was written before it
    outside = {op.name for op in graph.ops if not op.source.module.startswith("layers")}
    assert outside and outside.isdisjoint(found)


def test_compiled_layers_are_faster_and_no_less_than_their_products():
    graph = sw.capture(Blocks(), (torch.zeros(4096, 8),))
    eager = sw.price(graph, "2xH100", "dp_replicate=2 zero=0")
    fused = sw.price(graph, "2xH100", "dp_replicate=2 zero=0 compile=regional")
    assert fused.compiled and fused.step_seconds < eager.step_seconds
    seconds = {
        plan.name: sum(op.seconds for op in plan.ops if op.target.startswith("aten.linear"))
        for plan in (eager, fused)
    }
    assert len(set(seconds.values())) == 1
