"""Linear layers in 8 bits, and what they save."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwright as sw
from shardwright.ir.options.fp8 import executed_by
from shardwright.rules.operators.fp8_layers import Fp8LayersError, fp8_layers, with_fp8

TOKENS, WIDTH, INNER = 32, 64, 96


class Gated(nn.Module):
    """Two layers of one input, one whose width is no multiple of 16, and a head."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.narrow, self.down = nn.Linear(INNER, 24), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, 48)

    def forward(self, x, labels):
        inner = F.silu(self.gate(x)) * self.up(x)
        hidden = self.down(inner) + self.narrow(inner).sum()
        return F.cross_entropy(self.head(hidden), labels)


@pytest.fixture(scope="module")
def graph():
    x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    return sw.capture(Gated().to(torch.bfloat16).to("meta"), (x, labels))


def layer(graph, name):
    return next(op for op in graph.ops if f"{name}.weight" in op.operands)


def test_all_but_the_last_and_uneven_layers_are_in_8_bits_and_cast_an_input_once(graph):
    found = fp8_layers(with_fp8(graph, executed_by("rowwise", compiled=True)))
    expected = {"gate": True, "up": False, "down": True}
    assert found == {layer(graph, name).name: first for name, first in expected.items()}
    assert fp8_layers(graph) == {}


def test_torchao_saves_what_the_module_saves(graph):
    found = with_fp8(graph, executed_by("tensorwise", compiled=True))
    assert found.ops == graph.ops
    assert found.numerics.fp8 == "torchao:tensorwise" and found.fingerprint != graph.fingerprint


@pytest.mark.parametrize(("name", "scales"), [("delayed", 0), ("blockwise", TOKENS * WIDTH / 32)])
def test_transformer_engine_saves_one_copy_of_an_input_in_8_bits(graph, name, scales):
    found = with_fp8(graph, executed_by(name, compiled=False))
    gate, up, head = (layer(found, part) for part in ("gate", "up", "head"))
    assert gate.saves == ("gate.weight",) and up.saves == ("up.weight",)
    assert (gate.extra_saved, up.extra_saved) == (TOKENS * WIDTH + scales, 0)
    assert head == layer(graph, "head")


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.bfloat16), (16, torch.float64)])
def test_a_model_without_such_layers_is_refused(width, dtype):
    x = torch.zeros(4, width, dtype=dtype)
    small = nn.Sequential(nn.Linear(width, 32), nn.Linear(32, 8)).to(dtype)
    graph = sw.capture(small, (x,), loss="outside")
    with pytest.raises(Fp8LayersError, match="multiples of 16, in 16 or 32 bits"):
        with_fp8(graph, executed_by("rowwise", compiled=True))
