"""Numbers of micro-batches with which each mesh is searched."""

import math
from types import SimpleNamespace

import pytest

from shardwright.ir.layout import Mesh
from shardwright.planner.meshes.mesh_turns import search_meshes

ONE, OTHER = Mesh.parse("dp=4"), Mesh.parse("tp=4")


@pytest.mark.parametrize("within, tried", [(1.0, [1, 2]), (math.inf, [1, 2, 4])])
def test_a_mesh_is_left_out_once_more_micro_batches_bring_nothing(monkeypatch, within, tried):
    """After one such number if a plan fits, else after two; the other mesh goes on."""
    runs = []

    def run(mesh, count, seconds, *, compare, parts):
        runs.append((mesh, count))
        return mesh is OTHER or count == 1

    options = SimpleNamespace(
        counts=None, constraints=(), meshes=None, memory_limit="unlimited", exact=False
    )
    loop = SimpleNamespace(
        options=options,
        best=None,
        best_within_limit=within,
        run=run,
        machine=None,
        ahead=SimpleNamespace(is_useful=False),
    )
    search_meshes(loop, (ONE, OTHER), (1, 2, 4, 8), math.inf, lambda what, done: None)
    assert [count for mesh, count in runs if mesh is ONE] == tried
    assert [count for mesh, count in runs if mesh is OTHER] == [1, 2, 4, 8]
