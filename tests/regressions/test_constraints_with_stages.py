"""Constraints that ended a search for reasons of other meshes, and meshes of pipelines.

`plan --stages 2 --mesh dp=2,tp=2` failed on four devices, and so did `--mesh dp=2`: a mesh had to
be of all devices and of one stage's group at once. A pin that some meshes of stages could not keep
was an error although other meshes had plans, as their reasons were counted together.

Now a mesh is that of one stage's group, or that of all devices with the groups as `pp`, and reasons
matter only where nothing was found. Baselines that do not follow a pin are shown as they are.
"""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.api import search_with as search
from shardwright.ir.options.constraints import ConstraintError
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from tests.harness.layered_graphs import residual_layers

MACHINE = preset("4xH100")


@pytest.fixture(scope="module")
def graph():
    return residual_layers(3)


@pytest.mark.parametrize(
    "mesh, stages, meshes",
    [
        ("mesh dp=2", (2,), {"pp=2 dp=2"}),
        ("mesh pp=2 dp=2", (2,), {"pp=2 dp=2"}),
        ("mesh pp=2 dp=2", (1,), {"pp=2 dp=2"}),
        ("mesh dp=2 tp=2", (1, 2), {"dp=2 tp=2"}),
        ("mesh dp=2 pp=2", (1,), {"dp=2 pp=2"}),  # the stages of a replica are neighbours
    ],
)
def test_a_mesh_is_of_a_stage_or_of_all_devices(graph, mesh, stages, meshes):
    found = search(
        graph, MACHINE, PlanOptions.of(constraints=[mesh], stages=stages, recompute=False)
    )
    assert {str(plan.mesh) for plan in found} == meshes
    assert all((plan.stages > 1) == ("pp" in str(plan.mesh)) for plan in found)


def test_a_mesh_of_neither_is_an_error_that_names_both(graph):
    with pytest.raises(ConstraintError, match="one stage's group, of 2, or of all of them, pp=2"):
        search(graph, MACHINE, PlanOptions.of(constraints=["mesh dp=2 tp=2"], stages=(2,)))


@pytest.mark.parametrize("pin", ["*=dp:S(0)", "*=dp:S(1)", "*=*:R", "*.left.weight=tp:S(0)"])
def test_baselines_that_do_not_follow_a_pin_are_shown(graph, pin):
    found = search(
        graph, MACHINE, PlanOptions.of(constraints=[f"pin {pin}"], stages=(1, 2), recompute=False)
    )
    names = {plan.name for plan in found.baselines}
    assert {"data parallel", "fully sharded"} <= names
    assert set(found.broken) <= names
    assert found.broken


class Classifier(nn.Module):
    """Channels and classes whose sizes few meshes divide."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x, y):
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return nn.functional.cross_entropy(self.head(h), y)


def test_meshes_that_a_pin_rules_out_do_not_end_the_search():
    """As many meshes refused as there were of all devices, but some of these were of stages."""
    with torch.device("meta"):
        batch = torch.zeros(16, 3, 9, 9), torch.zeros(16, dtype=torch.long)
        graph = sw.capture(Classifier(), batch)
    pin = ["pin *=tp:features"]
    alone = search(graph, MACHINE, PlanOptions.of(constraints=pin))
    both = search(graph, MACHINE, PlanOptions.of(constraints=pin, stages=(1, 2)))
    assert both[0].step_seconds <= alone[0].step_seconds
