"""Which MLPs are computed in chunks, and what their graphs are then."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.graph import verify
from shardwright.rules.analysis import analyze
from shardwright.rules.operators.mlp_chunks import (
    CHUNKED_MLP,
    MlpChunksError,
    largest_mlp,
    number_drawn_by,
    with_mlp_chunks,
)
from shardwright.tracing.export.operators import call_op
from tests.harness import models

WIDTH, INNER = 6, 10


class Model(nn.Module):
    """A residual block whose MLP is a function of the block and its input."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down, self.narrow = nn.Linear(INNER, WIDTH), nn.Linear(INNER, 3)
        self.both = nn.Linear(WIDTH, 2 * INNER)
        self.scale = nn.Parameter(torch.ones(INNER))

    def forward(self, x):
        return (self.mlp(self, x).square()).mean()


def gated(m, x):
    return x + m.down(F.silu(m.gate(x)) * m.up(x))


def through_views(m, x):
    return x + m.down(F.gelu(m.up(x).flatten(0, 1)).unflatten(0, x.shape[:2]))


def together(m, x):
    gate, up = m.both(x).chunk(2, -1)
    return x + m.down(F.silu(gate) * up)


def cast(m, x):
    return x + m.down(F.silu(m.up(x).float()).double())


def read_twice(m, x):
    hidden = m.up(x).relu()
    return x + m.down(hidden) + 1e-3 * hidden.mean()


def with_dropout(m, x):
    return x + m.down(F.dropout(m.up(x).relu(), 0.5))


def dropped_twice(m, x):
    return x + m.down(F.dropout(F.dropout(m.up(x), 0.5).relu(), 0.5))


def dropped_all(m, x):
    return x + m.down(F.dropout(m.up(x).relu(), 1.0))


def two_inputs(m, x):
    return x + m.down(m.gate(x).sigmoid() * m.up(x.tanh()))


def scaled(m, x):
    return x + m.down(m.up(x).relu() * m.scale)


def normed(m, x):
    return x + m.down(F.layer_norm(m.up(x), (INNER,)).relu())


X = torch.linspace(-2, 2, 72, dtype=torch.float64).view(4, 3, WIDTH)


@pytest.mark.parametrize("mlp, count", ((gated, 2), (together, 1), (through_views, 1), (cast, 1)))
def test_the_graph_in_chunks_computes_the_same_without_inner_tensors(mlp, count):
    model = Model(mlp).double()
    graph = sw.capture(model, (X,))
    chunked = with_mlp_chunks(graph, 5)
    verify(chunked)
    (op,) = (op for op in chunked.ops if op.target == CHUNKED_MLP)
    weights = {op.operands[0], *op.operands[1 : 1 + count]}
    assert len(weights) == count + 1 and weights < {*op.saves}
    assert "down.bias" in op.operands and "down.bias" not in op.saves
    parameters = {leaf.name for leaf in chunked.leaves}
    inner = (v for v in chunked.values if v.shape[-1:] == (INNER,) and v.name not in parameters)
    assert not list(inner)
    assert chunked.numerics.mlp_chunks == 5 and chunked.fingerprint != graph.fingerprint
    assert chunked == sw.capture(model, (X,), mlp_chunks=5)
    # SiLU in float32 rounds differently in vectors than in the rest of a chunk.
    exact = 1e-6 if mlp is cast else 1e-9
    assert _value(chunked, model) == pytest.approx(_value(graph, model), rel=exact)


def _value(graph, model):
    values = {"args.0": X, **{name: p.detach() for name, p in model.named_parameters()}}
    for op in graph.ops:
        values.update(zip(op.outputs, call_op(op, values, torch.device("cpu")), strict=True))
    (loss,) = graph.outputs
    return values[loss].item()


@pytest.mark.parametrize(
    "mlp, reason",
    (
        (read_twice, "tensors inside of the MLP of down .* are also read by"),
        (dropped_twice, "the MLP of down .* has dropout inside more than once"),
        (dropped_all, "the MLP of down .* has dropout inside that keeps nothing"),
        (two_inputs, "the MLP of down .* has not one input"),
        (scaled, "the MLP of down .* has other tensors inside|no two products"),
        (normed, "the model has no two products"),
        (lambda m, x: m.narrow(m.up(x).relu()), "the MLP of narrow .* changes shape or dtype"),
        (lambda m, x: x + m.down(m.up(x)), "the model has no two products"),
        (lambda m, x: x + m.down(m.both(x)[..., :INNER].relu()), "the model has no two products"),
    ),
)
def test_other_mlps_are_whole_and_refused_where_chunks_are_asked_for(mlp, reason):
    graph = sw.capture(Model(mlp).double(), (X,))
    with pytest.raises(MlpChunksError, match=f"mlp_chunks=4 is not possible: .*{reason}"):
        with_mlp_chunks(graph, 4)
    assert with_mlp_chunks(graph, 1).ops == graph.ops and largest_mlp(graph) == (0, 0)


def test_dropout_inside_has_its_own_number_and_is_whole_where_torch_draws():
    model = Model(with_dropout).double()
    graph = sw.capture(model, (X,))
    (whole,) = (op for op in graph.ops if op.kind == "dropout")
    (op,) = (op for op in with_mlp_chunks(graph, 4).ops if op.target == CHUNKED_MLP)
    assert number_drawn_by(op) == whole.args[2] == 0
    with pytest.raises(MlpChunksError, match="rng='fast' draws as a whole"):
        with_mlp_chunks(sw.capture(model, (X,), rng="fast"), 4)


def test_inner_tensors_that_are_returned_are_refused():
    graph = sw.capture(Model(gated).double(), (X,))
    gate = next(op for op in graph.ops if op.kind == "silu").outputs[0]
    with pytest.raises(MlpChunksError, match="are also returned"):
        with_mlp_chunks(replace(graph, outputs=(*graph.outputs, gate)), 2)


@pytest.mark.hf
@pytest.mark.parametrize("name, products, biases, tensors", (("llama", 2, 0, 4), ("gpt2", 1, 1, 9)))
def test_mlps_of_published_models_belong_to_their_modules(name, products, biases, tensors):
    model, batch = models.EXAMPLES[name]()
    graph = sw.capture(model, (), batch)
    rows, row_bytes = largest_mlp(graph)
    chunked = with_mlp_chunks(graph, 3)
    verify(chunked)
    (op,) = (op for op in chunked.ops if op.target == CHUNKED_MLP)
    assert op.source.module.endswith("0.mlp")
    assert len(op.args[1]) == products and sum(one is not None for one in op.args[2]) == biases
    inner = chunked.tensor[op.operands[1]].shape[0 if op.args[5][0] else 1]
    assert rows == 35 and row_bytes == 2 * tensors * 4 * inner, "products, steps, gradients"
    rule = analyze(chunked).rules[op.name]
    assert {factor.name[0] for factor in rule.factors if factor.kind.value == "parallel"} == {
        "b",
        "i",
    }
