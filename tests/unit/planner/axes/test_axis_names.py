"""Names of axes after a search; `axes/plan_roles.py` is tested through them and the headlines."""

from dataclasses import replace

import pytest

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.axes.axis_names import AxisNames
from tests.harness import plans

MACHINE = preset("2x2xH100")


def plan(splits, parameters=(), mesh="dp=2 tp=2", more=()):
    mesh = Mesh.parse(mesh)
    ops = [
        replace(plans.op(f"a{i}", "linear", "a", 1, "m n", "dp:S(0) tp:S(1)"), splits=words)
        for i, words in enumerate((splits, *more))
    ]
    moves = (plans.moved("a", "b", "forward", "all_gather dp, all_reduce tp", 1, 1),)
    return replace(
        plans.simple(), mesh=mesh, ops=tuple(ops), parameters=parameters, transfers=moves
    )


SHARDED = plans.parameter("weight", "dp:R tp:S(0)")


@pytest.mark.parametrize(
    "splits, parameters, names",
    [
        (("batch", "heads"), (), "dp=2 tp=2"),
        (("features", "batch"), (), "tp=2 dp=2"),
        (("features", "features (sum)"), (), "tp_1=2 tp_2=2"),
        (("batch", "batch"), (), "dp_1=2 dp_2=2"),
        (("batch", "batch"), (SHARDED,), "dp_replicate=2 dp_shard=2"),
        (("batch", "sequence (ring)"), (), "dp=2 cp=2"),
        (("batch", "batch to experts"), (), "dp=2 ep=2"),
        (("batch", "-"), (), "dp=2 nvlink2=2"),
        (("-", "-"), (), "network2=2 nvlink2=2"),
    ],
)
def test_axes_are_named_by_what_they_do(splits, parameters, names):
    found = AxisNames(MACHINE).named(plan(splits, parameters))
    assert str(found.mesh) == names
    outer, inner = found.mesh.names
    assert found.transfers[0].collectives == (f"all_gather {outer}", f"all_reduce {inner}")
    for one in (*found.ops, *found.parameters):
        assert one.layout.mesh == found.layout_mesh


def test_an_axis_of_several_roles_has_the_name_of_its_link_and_size():
    mixed = plan(("batch", "batch"), more=[("batch", "features")])
    assert str(AxisNames(MACHINE).named(mixed).mesh) == "dp=2 nvlink2=2"


def test_names_that_the_user_chose_stay_and_are_never_given_twice():
    swapped = plan(("features", "batch"))
    assert AxisNames(MACHINE, {"dp", "tp"}).named(swapped) is swapped
    assert str(AxisNames(MACHINE, {"tp"}).named(swapped).mesh) == "tp_1=2 tp=2"
    own = plan(("features", "batch"), mesh="outer=2 inner=2")
    assert AxisNames(MACHINE).named(own) is own


def test_groups_of_a_pipeline_keep_their_axis():
    staged = replace(plan(("features", "batch"), mesh="pp=2 dp=2 tp=2"), schedule="1F1B", stages=2)
    assert str(AxisNames(preset("2x4xH100")).named(staged).mesh) == "pp=2 tp=2 dp=2"


def test_a_strategy_on_a_mesh_that_was_given_has_its_names():
    found = replace(plan(("batch", "heads"), mesh="dp_shard=2 tp=2"), transfers=())
    meshes = [Mesh.parse("tp=2 dp=2"), Mesh.parse("dp=2 inner=2")]
    named = AxisNames(MACHINE, {"dp", "inner"}).as_given(found, meshes)
    assert str(named.mesh) == "dp=2 inner=2"
    assert AxisNames(MACHINE).as_given(found, meshes[:1]) is found
