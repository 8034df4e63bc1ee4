"""Which pieces of a program are compiled, told without compiling any."""

import pytest
import torch
from torch import fx, nn

from shardwright.runtime.graph_modules import compiled as subject
from shardwright.runtime.parameters.reshard_after_forward import ReshardAfterForward


def layers(between):
    """Two products, what is called between them, and a third that keeps nothing of its matrix."""
    graph, root = fx.Graph(), nn.Module()
    first, second = (graph.placeholder(f"p{i}") for i in range(2))
    value = call(graph, "mm.default", graph.placeholder("x"), first)
    value = between(graph, value)
    root.add_module("dropped", ReshardAfterForward(torch.mm, []))
    square = graph.call_module("dropped", ([], [], (second, second), {}))
    graph.output(call(graph, "mm.default", value, square))
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
    compiled = []

    def note(self):
        compiled.append(self)

    monkeypatch.setattr(fx.GraphModule, "compile", note)
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
    assert any(piece is first for piece in compiled) == (len(kept) > 1)  # one has nothing to fuse
