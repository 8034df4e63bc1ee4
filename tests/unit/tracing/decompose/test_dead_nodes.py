"""What nothing reads, removed from graphs before they are decomposed."""

import torch
from torch import fx, nn

import shardwright as sw
from shardwright.tracing.decompose.dead_nodes import remove_dead_nodes


class Masked(nn.Module):
    """A mask made by `vmap` over pairs of positions, beside a region without gradients."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        def visible(query, key):
            return query.new_ones((), dtype=torch.bool) & (query >= key)

        at = torch.arange(x.shape[0])
        rows = torch.vmap(torch.vmap(visible, (None, 0)), (0, None))
        mask = rows(at, at).to(x.dtype)
        with torch.no_grad():
            scale = x.abs().amax()
        return (mask @ self.linear(x) * scale).sum()


def test_levels_of_vmap_stay_beside_a_region_without_gradients():
    model, x = Masked(), torch.randn(3, 4)
    plan = sw.search(sw.capture(model, (x,)), sw.Machine.preset("2xcpu")).fastest()
    assert sw.verify(model, plan, (x,)).max_gradient_error < 1e-12


def test_unread_operators_are_removed():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.aten.sin.default, (x,))
    begins = graph.call_function(remove_dead_nodes, (x,))  # stands for a call with an effect
    graph.output(x)
    remove_dead_nodes(graph)
    assert [node for node in graph.nodes if node.op == "call_function"] == [begins]
