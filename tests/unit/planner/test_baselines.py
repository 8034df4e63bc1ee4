"""Baselines of searches are the strategies that their texts say."""

import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.baselines import _TEXTS, baseline_candidates, baselines
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.expansion import Expansion
from shardwright.tracing.capture import capture_call
from tests.harness import models

MACHINE = preset("2x2xH100")


@pytest.fixture(scope="module")
def graph():
    model, batch = models.small_llama(layers=2, hidden=32, heads=4, rows=8, length=8)
    return capture_call(model, (), batch).graph


@pytest.mark.hf
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2 tp=2"])
def test_a_baseline_has_the_price_of_its_strategy(graph, mesh):
    """But where operators follow others in the searched space, which is less than a per cent."""
    mesh = Mesh.parse(mesh)
    expansion = Expansion(graph, MACHINE.with_devices(mesh.size), "adamw")
    machine = expansion.waiting(mesh.size, 1, staged=False)
    space, short = SpaceFactory(graph, recompute=False).space(machine, mesh, "adamw", 1)
    found = {
        one.name: one for one in baseline_candidates(PlanBuilder(space, graph, short, "adamw"))
    }
    texts = {name: text for name, text in _TEXTS if text.count("{}") == len(mesh.axes)}
    assert found.keys() == texts.keys()
    for name, text in texts.items():
        seconds, peak = expansion.expanded(Strategy.parse(text.format(*mesh.shape))).cost
        assert found[name].cost == (pytest.approx(seconds, rel=0.02), peak), name


@pytest.mark.hf
def test_axes_of_one_device_split_nothing(graph):
    one, single = Mesh.parse("dp=1 tp=4"), Mesh.parse("tp=4")
    factory = SpaceFactory(graph, recompute=False)
    spaces = [factory.space(MACHINE, mesh, "adamw", 1)[0] for mesh in (one, single)]
    wide, narrow = (dict(baselines(space)) for space in spaces)
    name = "tensor parallel"
    costs = [
        space.prices.point(space.folded.expand(found))[:2]
        for space, found in zip(spaces, (wide[f"data x {name}"], narrow[name]), strict=True)
    ]
    assert costs[0] == costs[1]


def test_degrees_that_split_no_weight_are_left_out(graph):
    """Heads, inner features and vocabulary are not divided by 7."""
    machine = preset("7xH100")
    space, _ = SpaceFactory(graph, recompute=False).space(machine, Mesh.parse("tp=7"), "adamw", 1)
    assert [name for name, _ in baselines(space)] == ["data parallel", "ZeRO-2", "fully sharded"]
