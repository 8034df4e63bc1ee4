"""Which pieces of a program are compiled, told without compiling any."""

import pytest
import torch
from torch import fx, nn

from shardwright.lower.program import Fetch, Load
from shardwright.runtime import compiled as subject
from shardwright.runtime.loading import Loading


def program(sizes):
    """Layers that each bring in a parameter of so many MiB, and add it."""
    graph, root = fx.Graph(), nn.Module()
    parameters = [graph.placeholder(f"p{i}") for i in range(len(sizes))]
    value = graph.placeholder("x")
    for i, (mib, parameter) in enumerate(zip(sizes, parameters, strict=True)):
        shape = (int(mib * 2**18),)
        root.add_module(f"load{i}", Loading(Fetch((Load(f"p{i}", f"p{i}", shape),), "w", (False,))))
        brought = graph.call_module(f"load{i}", (parameter,))
        tile = graph.call_function(lambda given, place: given[place], (brought, 0))
        tile.name = f"getitem_{i}"
        value = graph.call_function(torch.add, (value, tile))
    graph.output(value)
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize(
    "sizes, pieces",
    [
        ((4, 4, 4, 4, 4, 4), [5, 1]),  # the last one's gradient is sent off first
        ((10, 10, 10, 10, 10, 2), [2, 2, 1, 1]),  # at most 25 MiB in one
        ((40, 40, 2), [1, 1, 1]),
        ((8, 0.5, 0.25, 0.5), [1, 3]),  # at least 1 MiB in the last
        ((0.1, 0.1), [2]),
    ],
)
def test_pieces_are_as_large_as_buckets_of_gradients_and_the_last_is_small(sizes, pieces):
    whole = program(sizes)
    parts, eager = subject._parts(whole, dict(whole.named_modules()))
    adds = [parts[node] for node in whole.graph.nodes if node.target is torch.add]
    assert [adds.count(number) for number in sorted(set(adds))] == pieces
    assert eager.isdisjoint(adds)
    order = [parts[node] for node in whole.graph.nodes if node in parts]
    for node in whole.graph.nodes:  # nothing comes before what it takes
        assert all(
            parts.get(given, -1) <= parts[node] for given in node.all_input_nodes if node in parts
        )
    assert len(set(order)) == 2 * len(pieces)
