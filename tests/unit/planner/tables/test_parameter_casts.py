"""Casts of parameters, once a step: kernels of bytes over the memory's rate, and launches."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.planner.tables.objective import Duration
from shardwright.planner.tables.parameter_casts import cast_seconds
from tests.harness.small_graphs import linear_layer, toy_machine

LAUNCH, RATE = 1.0, 4096.0  # of the machine
TILE = 2048  # elements


def seconds(stored, read, *, used="bfloat16", precision="model", fp8="", trained=True):
    """The casts of a tile of a weight with these bytes an element, stored and as it is read."""
    graph, _ = linear_layer()
    found = replace(
        graph.tensor["w"], dtype=used, gathered_as="float8_e4m3fn" if fp8 else "",
        requires_grad=trained,
    )  # fmt: skip
    values = tuple(found if one.name == "w" else one for one in graph.values)
    numerics = replace(graph.numerics, precision=precision, fp8=fp8)
    graph = replace(graph, values=values, numerics=numerics)
    assert ("w" in graph.trained) == trained
    given = (np.array([TILE * size]) for size in (stored, read))
    (cast,) = cast_seconds(Duration(toy_machine(), Mesh.parse("dp=2")), graph, "w", *given)
    return cast


def kernels(*sizes):
    return sum(LAUNCH + TILE * size / RATE for size in sizes)


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"stored": 2, "read": 2}, ()),
        ({"stored": 4, "read": 2, "precision": "bf16"}, (6, 6)),
        ({"stored": 4, "read": 2, "precision": "bf16", "trained": False}, (6,)),
        ({"stored": 2, "read": 1, "fp8": "TransformerEngine:delayed:gather"}, (3,)),
        ({"stored": 2, "read": 1, "fp8": "torchao:tensorwise:gather"}, (3, 2)),
        (
            {"stored": 4, "read": 1, "fp8": "torchao:tensorwise:gather", "precision": "bf16"},
            (5, 4, 6),
        ),
    ],
)
def test_a_cast_reads_the_stored_tile_and_writes_the_other(given, moved):
    assert seconds(**given) == pytest.approx(kernels(*moved))
