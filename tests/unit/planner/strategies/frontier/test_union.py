"""What a search tries around the best strategies: meshes of three axes, and pipelines."""

import math

import pytest

import shardwright as sw
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.strategies.frontier.union import around
from tests.unit.planner.strategies.frontier.test_starting import llama

WIDE = ("dp_replicate=2 dp_shard=4 tp=2", "dp_replicate=2 dp_shard=4 tp=2 zero=0 sp=off")


def spaces(*texts, most=4):
    return list(around([Strategy.parse(text) for text in texts], {}, most))


def test_strategies_of_one_mesh_share_a_space():
    two = "dp_shard=8 tp=2"
    plain, deep = spaces(*WIDE, two, "dp_replicate=4 tp=2 pp=2 mb=4")
    assert (plain.mesh.shape, plain.like.pp) == ((2, 4, 2), 1)
    assert plain.decide is not None
    # Both strategies, each with other axes for data, and the first without sequence parallelism.
    styles = {(str(one.strategy), tuple(axis.role for axis in one.axes)) for one in plain.tilings}
    usual, data = ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard", "dp_shard")
    assert {(WIDE[0], usual), (WIDE[0] + " sp=off", usual), (WIDE[1], usual)} < styles
    assert (WIDE[0], data) in styles and len(styles) == 8
    assert (deep.mesh.shape, deep.like.pp, deep.decide) == ((4, 2), 2, None)


def test_so_many_meshes_are_tried_and_no_more():
    wide = [f"dp_replicate={2**n} dp_shard=4 tp=2" for n in range(1, 6)]
    assert [one.mesh.shape for one in spaces(*wide, most=2)] == [(2, 4, 2), (4, 4, 2)]


def test_no_space_around_strategies_is_worse_than_they_are():
    """The strategies are points of it: neither its bound nor its fastest plan is above them."""
    graph, machine = llama(), preset("2x8xH100")
    expansion = Expansion(graph, machine, "adamw")
    texts = (*WIDE, "dp_replicate=4 tp=2 pp=2 mb=4", "dp_replicate=2 dp_shard=2 tp=2 pp=2 mb=4")
    for one in spaces(*texts):
        loop = MeshLoop(SpaceFactory(graph, recompute=True), machine, PlanOptions())
        loop.run_around(one, math.inf)
        bound = loop.bounds[-1].seconds
        fastest = min(candidate.point.time for candidate in loop.found)
        for strategy in {tilings.strategy for tilings in one.tilings}:
            if strategy.sequence_parallel == one.like.sequence_parallel:
                priced = expansion.expanded(strategy)
                assert bound(priced.peak) <= priced.point.time * (1 + 1e-9)
                assert fastest <= priced.point.time * (1 + 1e-9)


def test_three_axes_are_searched_where_strategies_have_them():
    seen = []
    sw.search(llama(), "16x8xH100", progress=lambda what, _: seen.append(what))
    assert any(what.startswith("around the strategy dp_replicate=") for what in seen)
    seen.clear()
    bound = ["pin model.layers.*=*:R"]  # which these spaces would not keep
    sw.search(llama(), "16x8xH100", constraints=bound, progress=lambda what, _: seen.append(what))
    assert seen and not any("around" in what for what in seen)


def test_auto_searches_pipelines_around_strategies():
    graph = llama()
    found = sw.search(graph, "2x2xH100", stages="auto")
    plain = sw.search(graph, "2x2xH100", stages=(1,))
    assert found.fastest().step_seconds <= plain.fastest().step_seconds * (1 + 1e-9)
    assert found.costs == plain.costs and not plain.pipelines
    assert all(one.stages > 1 and one.peak_bytes <= plain.device_bytes for one in found.pipelines)


@pytest.mark.parametrize(
    "more",
    [{"constraints": ["mesh 2x2"]}, {"exact": True}, {"method": "kcut"}, {"micro_batches": (1,)}],
)
def test_options_that_rule_strategies_out_leave_no_stages(more):
    assert PlanOptions.of(**more).stages == PlanOptions.of(stages="auto", **more).stages == (1,)
    assert PlanOptions.of().stages == "auto"
