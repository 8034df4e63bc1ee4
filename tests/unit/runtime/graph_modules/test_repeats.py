"""Repeated layers of regions are one module, whose numbers are exact also where layers draw."""

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import shardwright as sw
from shardwright.runtime.graph_modules.repeats import segments
from shardwright.runtime.parameters.nan_origin import origin
from tests.harness import models
from tests.ranks.test_random_tilings import Widened


class Block(nn.Module):
    """Pre-norm, dropout and a ReLU."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        inner = nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.25)
        return x + torch.tanh(self.down(torch.sigmoid(inner))) * 0.5


class Deep(nn.Module):
    """Blocks whose output goes to a skip connection around all of them, and a loss."""

    def __init__(self, layers):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 6), nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x, y):
        x = start = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x + start, y)


def deep(layers, batch=6):
    torch.manual_seed(0)
    return Deep(layers), {"x": torch.randn(batch, 4), "y": torch.randn(batch, 6)}


def chain(layers):
    """Linear layers with a ReLU behind each: a period of two operators."""
    torch.manual_seed(0)

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    return Chain(), {"x": torch.randn(3, 5)}


def subject(example, rng="exact"):
    """A model's graph in float64."""
    one = Widened(*models.double(*example))
    for holder in (one, one.captured):
        numerics = replace(one.graph.numerics, rng=rng)
        object.__setattr__(holder, "graph", replace(holder.graph, numerics=numerics))
    return one


def segments_of(one):
    (region,) = one.one_device()._sw_program.regions.forms
    return segments(region)


@pytest.mark.parametrize("layers", [3, 7])
def test_a_layer_is_one_code_whatever_the_number_of_layers(layers):
    found = segments_of(subject(deep(layers)))
    assert len(found) == layers + 2
    assert len({one.code for one in found}) == 3
    block = found[1]
    assert all(one.code == block.code for one in found[1:-1])
    assert len(block.inputs) == 1 + 6, "one value is passed on, and six parameters are read"
    numbers = [one.numbers for one in found[1:-1]]
    assert len(set(numbers)) == layers, "every layer draws other numbers"


def test_short_periods_are_joined_and_end_with_a_product():
    found = segments_of(subject(chain(24)))
    assert len({one.code for one in found[1:-1]}) == 1 and len(found) > 4
    kinds = [[op.op.kind for op in one.code.variants[0]] for one in found[1:-1]]
    assert len(kinds[0]) == 8 and kinds[0][0] == "relu_" and kinds[0][-1] == "linear"


def test_segments_that_differ_in_a_constant_are_not_shared():
    class Scaled(nn.Module):
        def forward(self, x):
            for scale in (2, 2, 2.0, 2.0):
                for _ in range(4):
                    x = torch.tanh(x * scale)
            return x.sum()

    (region,) = (
        subject((Scaled(), {"x": torch.randn(3).requires_grad_()}))
        .one_device()
        ._sw_program.regions.forms
    )
    left, constants = list(region.variants[0]), {}
    for one in segments(region):
        for _ in one.code.variants[0]:
            arg = left.pop(0).op.args[-1]
            if isinstance(arg, int | float):
                constants.setdefault(one.code, set()).add(type(arg))
    assert {frozenset(found) for found in constants.values()} >= {
        frozenset({int}),
        frozenset({float}),
    }


@pytest.mark.parametrize(
    "rng, micro_batches", [("exact", 1), ("exact", 3), ("fast", 1)], ids=["", "uneven", "fast"]
)
def test_compiled_layers_draw_their_own_numbers(monkeypatch, rng, micro_batches):
    """Backend "eager" runs the operators themselves, so that results are equal to the bit."""
    compiled = []
    run = fx.GraphModule.compile

    def compile_eagerly(module, **options):
        compiled.append(module)
        run(module, backend="eager", **options)

    monkeypatch.setattr(fx.GraphModule, "compile", compile_eagerly)
    codes = []
    for layers in (3, 5):
        one = subject(deep(layers, batch=7), rng)
        expected = one.run(one.one_device(micro_batches))
        module = one.one_device(micro_batches)
        module.compile_programs()
        found = one.run(module)
        assert found.keys() == expected.keys()
        for key in expected:
            assert torch.equal(found[key], expected[key]), key
        codes.append(len(compiled))
        module.eval()
        with torch.no_grad():
            assert torch.equal(
                module(**one.batch), one.one_device(micro_batches).eval()(**one.batch)
            )
    assert codes[1] == 2 * codes[0], "as many for five layers as for three"


def test_a_plan_with_compiled_layers_runs_compiled(monkeypatch):
    """`shardwright run` compiled such a plan, and `parallelize` did not."""
    monkeypatch.setattr(fx.GraphModule, "compile", lambda module, **_: None)
    model, batch = deep(3)
    graph = sw.capture(model, (), batch)
    for text, compiles in (("compile=regional", True), ("mb=1", False)):
        module = sw.parallelize(model, sw.price(graph, "1xcpu", text))
        assert (module._sw_program.regions.compiled is not None) == compiles


def test_the_origin_of_nan_is_found_in_a_compiled_module(monkeypatch):
    monkeypatch.setattr(fx.GraphModule, "compile", lambda module, **_: None)
    model, batch = deep(3)
    with torch.no_grad():
        model.blocks[1].down.weight.fill_(float("inf"))
    module = sw.parallelize(model, sw.plan(model, (), batch, machine="1xcpu"))
    module.compile_programs()
    executed = module._sw_program.regions.executed
    assert "parameter blocks.1.down.weight" in origin(module, batch, (0, 0))
    with torch.no_grad():
        module.get_parameter("blocks.1.down.weight").fill_(1e38)
        module.get_parameter("blocks.1.up.bias").fill_(1e38)
    batch = {**batch, "x": batch["x"] * 1e38}
    assert "in first" in origin(module, batch, (0, 0)) or "blocks.0" in origin(
        module, batch, (0, 0)
    )
    assert module._sw_program.regions.executed is executed
