"""Which pieces of a program are compiled, told without compiling any."""

import operator

import pytest
import torch
from torch import fx, nn

from shardwright.program.instructions import Fetch, Load
from shardwright.runtime import compiled as subject
from shardwright.runtime.parameters.unshard import Loading


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


def layers(between):
    """Two layers that each bring in a matrix of 2 MiB, and what is called between them."""
    graph, root = fx.Graph(), nn.Module()
    parameters = [graph.placeholder(f"p{i}") for i in range(2)]
    value = graph.placeholder("x")
    for i, parameter in enumerate(parameters):
        fetch = Fetch((Load(f"p{i}", f"p{i}", (724, 724)),), "w", (False,))
        root.add_module(f"load{i}", Loading(fetch))
        brought = graph.call_module(f"load{i}", (parameter,))
        tile = graph.call_function(operator.getitem, (brought, 0))
        value = call(graph, "mm.default", value, tile)
        if i == 0:
            value = between(graph, value)
    graph.output(value)
    return fx.GraphModule(root, graph)


def call(graph, name, *given):
    kind, overload = name.split(".")
    return graph.call_function(getattr(getattr(torch.ops.aten, kind), overload), given)


def relu(graph, x):
    return call(graph, "relu_.default", x)


def a_view(graph, x):
    return call(graph, "view.default", call(graph, "relu_.default", x), [8, 724])


def needed_before(graph, x):
    """What is needed later reads x, and then what is needed now writes over it."""
    later = call(graph, "exp.default", x)
    square = call(graph, "mm.default", call(graph, "t.default", relu(graph, x)), later)
    return call(graph, "mm.default", later, square)


def needed_later(graph, x):
    later = call(graph, "exp.default", x)
    total = call(graph, "sum.dim_IntList", relu(graph, x), [0], True)
    return call(graph, "mul.Tensor", later, total)


@pytest.mark.parametrize(
    "between, kept",
    [
        (relu, ["mm"]),
        (a_view, ["mm", "relu", "view"]),
        (needed_before, ["mm", "exp", "relu", "t", "mm", "mm"]),
        (needed_later, ["mm", "relu", "sum"]),
    ],
)
def test_elementwise_operators_at_a_pieces_end_begin_the_next(monkeypatch, between, kept):
    monkeypatch.setattr(fx.GraphModule, "compile", lambda self: None)
    torch.manual_seed(0)
    given = (*(torch.randn(724, 724) / 27 for _ in range(2)), torch.randn(8, 724))
    expected = layers(between)(*given)
    pieces = subject.compiled(layers(between))
    assert torch.equal(pieces(*given), expected)
    first = next(
        piece
        for piece in pieces.children()
        if any(node.target == torch.ops.aten.mm.default for node in piece.graph.nodes)
    )
    called = [node.target for node in first.graph.nodes if node.op == "call_function"]
    assert [str(target).split(".")[1] for target in called] == kept
