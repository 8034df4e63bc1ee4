"""A vocabulary of 50,257 over eight devices: seven tiles of 6,283 words, and one of 6,276."""

import pytest
import torch

from shardwright.ir.layout import Mesh
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.tracing.own_operators.lookup import local_index
from tests.harness.operator_calls import call
from tests.harness.simulated_ranks import lengths
from tests.property.test_rules_laws import _run

WORDS, MESH = 50257, Mesh.parse("tp=8")
TILES = [6283] * 7 + [6276]


def numbers(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


# The first and the last word of a tile, one whose label counts nothing, and the last of all.
LABELS = torch.tensor([0, 6282, 6283, 43981, 17, WORDS - 1])
CALLS = {
    "look-up": (call("embedding.default", numbers(WORDS, 2), LABELS, 17), "v"),
    "loss": (call("cross_entropy_loss.default", numbers(6, WORDS), LABELS, None, 2, 17), "c"),
    "smoothed": (
        call("cross_entropy_loss.default", numbers(6, WORDS), LABELS, None, 2, 17, 0.1),
        "c",
    ),
    "head": (call("linear.default", numbers(3, 2), numbers(WORDS, 2)), "n"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_uneven_vocabulary_equals_one_device(name):
    one, factor = CALLS[name]
    analysis = analyze(one.graph)
    tiling = parse_tiling(analysis.rules["y"], (factor,))
    alone = _run(one, analysis, Mesh.parse("tp=1"), (None,))
    tiled = _run(one, analysis, MESH, tiling)
    assert alone.keys() == tiled.keys() and len(alone) >= 2
    for key, value in alone.items():
        torch.testing.assert_close(tiled[key], value, rtol=1e-9, atol=1e-9)


def test_tiles_are_as_equal_as_can_be():
    assert lengths(WORDS, 8) == TILES and sum(TILES) == WORDS


def test_places_in_a_tile_are_found_within_one_compiled_graph():
    """A generator in it ended `torch.compile(pm, fullgraph=True)` where a vocabulary is split."""
    compiled = torch.compile(local_index, backend="eager", fullgraph=True)
    words, tile = torch.arange(12), (1, 2, 3, 0, 4, 4)  # the last two of three runs of four
    for found, expected in zip(compiled(words, tile), local_index(words, tile), strict=True):
        assert torch.equal(found, expected)
    assert compiled(words, tile)[1].tolist() == [False] * 4 + [True] * 8
