"""Ranks of pipeline groups on meshes with the pipeline's axis anywhere, against coordinates."""

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import AXIS, StageRanks, groups_of, stage_mesh, whole_mesh

MESHES = [
    "pp=2 dp=3 tp=2",
    "dp=3 pp=2 tp=2",
    "dp=3 tp=2 pp=4",
    "dp_replicate=2 dp_shard=3 pp=2 cp=2 tp=2",
    "dp=1 pp=2 tp=2",
    "pp=4",
    "dp=4",
]


@pytest.mark.parametrize("text", MESHES)
def test_ranks_of_a_group_are_numbered_as_its_mesh(text):
    whole = Mesh.parse(text)
    groups, stage = groups_of(whole), stage_mesh(whole)
    ranks = StageRanks.of(stage, groups)
    every = np.arange(whole.size).reshape(whole.shape)
    axis = whole.names.index(AXIS) if AXIS in whole.names else None
    rows = [every] if axis is None else np.moveaxis(every, axis, 0)
    assert (ranks.groups, ranks.size) == (len(rows), whole.size // len(rows))
    for group, row in enumerate(rows):
        assert ranks.of_group(group) == tuple(row.ravel().tolist())
        for place, rank in enumerate(row.ravel().tolist()):
            assert (ranks.rank(group, place), ranks.position(rank)) == (rank, (group, place))


@pytest.mark.parametrize("text", MESHES)
def test_the_mesh_of_all_groups_has_the_same_ranks(text):
    whole = Mesh.parse(text)
    stage, groups = stage_mesh(whole), groups_of(whole)
    assert AXIS not in stage.names
    again = stage_mesh(whole_mesh(stage, groups))
    assert (again, StageRanks.of(again, groups)) == (stage, StageRanks.of(stage, groups))


def test_a_stage_of_neighbours_is_the_mesh_of_its_axes_alone():
    """So plans with the pipeline outermost share prices with those of one group's devices."""
    assert stage_mesh(Mesh.parse("pp=2 dp=2 tp=2")) == Mesh.parse("dp=2 tp=2")
    assert stage_mesh(Mesh.parse("dp=1 pp=2 tp=2")) == Mesh.parse("dp=1 tp=2")
    assert stage_mesh(Mesh.parse("dp=2 pp=1 tp=2")) == Mesh.parse("dp=2 tp=2")
    inside = stage_mesh(Mesh.parse("dp=2 pp=2 tp=2"))
    assert inside != Mesh.parse("dp=2 tp=2") and str(inside) == "dp=2 tp=2"
