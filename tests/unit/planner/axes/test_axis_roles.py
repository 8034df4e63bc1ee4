"""Meshes given by roles: operators keep to them, also in pipelines; shapes leave them open."""

from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import ConstraintError, parse_constraints
from shardwright.planner.permitted import allowed_meshes, permits_mesh
from shardwright.planner.strategies.preference import is_strategy


@pytest.fixture(scope="module")
def graph():
    class Mlp(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(2048, 8192)
            self.down = torch.nn.Linear(8192, 2048)

        def forward(self, x):
            return self.down(torch.relu(self.up(x))).square().sum()

    with torch.device("meta"):
        return sw.capture(Mlp(), (torch.zeros(8192, 2048),))


def words(plan, axis):
    """What operators split along an axis."""
    place = plan.layout_mesh.names.index(axis)
    return {op.splits[place].removesuffix(" (sum)") for op in plan.ops} - {"-", "partial sums"}


@pytest.mark.parametrize("texts", [["mesh dp=2,tp=2"], ["mesh tp=2,dp=2"], ["cap tp=2"]])
def test_axes_that_are_given_by_role_do_what_they_say(graph, texts):
    found = sw.search(graph, "4xH100", constraints=texts)
    permitted = [b for b in found.baselines if b.name not in found.broken]
    assert any(is_strategy(b) for b in permitted) or texts == ["mesh tp=2,dp=2"]
    for plan in (*found, *permitted):
        for axis in set(plan.mesh.names) & {"dp", "dp_shard", "dp_replicate"}:
            assert words(plan, axis) <= {"batch"}
        if "tp" in plan.mesh.names:
            assert words(plan, "tp") <= {"features"}
            assert dict(plan.mesh.axes)["tp"] <= 2


def test_a_pin_overrides_the_role_where_it_says_so(graph):
    texts = ["mesh dp=4", "pin up=dp:features"]
    for plan in sw.search(graph, "4xH100", constraints=texts):
        split = {op.source.module: op.splits for op in plan.ops}
        assert split["up"] == ("features",) and plan.mesh.names == ("dp",)


def test_axes_of_a_shape_may_do_anything_and_have_names_of_what_they_do(graph):
    found = sw.search(graph, "4xH100", constraints=["mesh 2x2"])
    assert {plan.mesh.shape for plan in found} == {(2, 2)}
    with_roles = sw.search(graph, "4xH100", constraints=["mesh dp=2,tp=2"])
    assert found[0].step_seconds <= with_roles[0].step_seconds * (1 + 1e-9)
    for plan in found:
        products = replace(plan, ops=tuple(op for op in plan.ops if op.kind == "linear"))
        for axis in set(plan.mesh.names) & {"dp", "tp"}:
            assert words(products, axis) <= ({"batch"} if axis == "dp" else {"features"})


def test_shapes_are_of_a_group_or_of_all_devices():
    def meshes(text, groups):
        devices = 8 // groups
        return [str(m) for m in allowed_meshes(devices, parse_constraints([text]), groups=groups)]

    assert meshes("mesh 4x2", 1) == ["dp=4 tp=2"]
    assert meshes("mesh 4", 2) == meshes("mesh 2x4", 2) == ["dp=4"]
    assert meshes("mesh 2x2x2", 2) == meshes("mesh 2x2", 2) == ["dp=2 tp=2"]
    with pytest.raises(ConstraintError, match="mesh 3x2 is of 6, not of 8 devices"):
        meshes("mesh 3x2", 1)


def test_a_pin_brings_the_meshes_of_its_role():
    found = allowed_meshes(8, parse_constraints(["pin *=ep:experts"]))
    assert {"dp=4 ep=2", "dp=2 ep=2 tp=2", "ep=8"} <= {str(mesh) for mesh in found}


@pytest.mark.parametrize(
    "text, mesh, groups, kept",
    [
        ("mesh dp=4,tp=2", "dp_shard=4 tp=2", 1, True),
        ("mesh tp=4,dp=2", "dp_shard=4 tp=2", 1, False),
        ("mesh 4x2", "dp_shard=4 tp=2", 1, True),
        ("mesh pp=2,dp=4", "dp_replicate=4", 2, True),
        ("mesh pp=2,dp=4", "dp_replicate=4", 1, False),
        ("mesh dp=4,pp=2", "dp_replicate=4", 2, False),  # whose stages are neighbours
        ("cap dp=4", "dp_replicate=2 dp_shard=4", 1, False),
        ("cap sp=1", "dp_shard=2 cp=2", 1, False),
    ],
)
def test_strategies_keep_meshes_and_caps(text, mesh, groups, kept):
    assert permits_mesh(parse_constraints([text]), Mesh.parse(mesh), groups) is kept
