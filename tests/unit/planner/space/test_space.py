import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.baselines import baselines
from shardwright.planner.space.checkpoint_segments import checkpoint_segments
from shardwright.planner.space.repeats import shorten
from shardwright.planner.space.space import make_folded_space, make_space
from shardwright.planner.tables.memory import bucket_sizes
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.pricing import Pricing
from shardwright.rules.analysis import analyze
from shardwright.solve.elimination.problem import price
from shardwright.solve.frontier.sweep import sweep
from tests.harness.layered_graphs import residual_layers

MESH = Mesh.parse("dp=2 tp=4")


def model(graph, mesh=MESH, machine="8xH100", whole=None):
    sizes = bucket_sizes(whole or graph)
    return CostModel(graph, analyze(graph), preset(machine), mesh, Pricing(buckets=sizes))


def folded(graph, mesh=MESH):
    short = shorten(graph)
    pieces = checkpoint_segments(short.graph, short.repeats)
    costs = model(short.graph, mesh, whole=graph)
    return make_folded_space(costs, short.repeats, short.skipped, pieces)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [5, 9])
def test_a_folded_space_has_the_frontier_of_the_whole(count, tied):
    graph = residual_layers(count, tied=tied)
    one, other = folded(graph), make_space(model(graph))
    assert one.folded.runs and not other.folded.runs
    assert one.folded.num_nodes == len(other.problem.nodes)
    left, right = (sweep(space.folded).points for space in (one, other))
    assert [p.memory for p in left] == [p.memory for p in right]
    assert [p.time for p in left] == pytest.approx([p.time for p in right], 1e-12)


def test_depth_does_not_change_the_problem():
    assert folded(residual_layers(6)).problem.sizes == folded(residual_layers(60)).problem.sizes


def test_pointwise_operators_without_partial_sums_follow_and_others_lead():
    space = make_space(model(residual_layers(2)))
    op_nodes = space.op_nodes
    assert op_nodes["layers.0.soft"].node == op_nodes["layers.0.hidden"].node
    assert not op_nodes["layers.0.soft"].leads and op_nodes["layers.0.hidden"].leads
    ops = {op.name: op for op in space.model.graph.ops}
    hidden, soft = (space.model.options(ops[f"layers.0.{name}"]) for name in ("hidden", "soft"))
    for k, option in enumerate(op_nodes["layers.0.soft"].options.tolist()):
        assert hidden.results[0, k] == soft.operands[0, option]


def test_projections_of_one_value_read_it_together():
    space = make_space(model(residual_layers(2)))
    shared = {reading.value: [op.name for op in reading.readers] for reading in space.readings}
    assert shared["first"] == ["layers.0.left", "layers.0.right"]
    node = space.first_reading
    edges = [edge for edge in space.problem.edges if edge.tail == node]
    assert len(edges) == 2
    assert all(set(np.unique(edge.time).tolist()) <= {0.0, np.inf} for edge in edges)


def test_baselines_are_allowed_assignments_in_their_order():
    space = make_space(model(residual_layers(2), Mesh.parse("dp=8")))
    found = dict(baselines(space))
    assert list(found)[:3] == ["data parallel", "ZeRO-2", "fully sharded"]
    data = space.tilings(found["data parallel"])
    assert {str(data[f"layers.0.{name}"][0]) for name in ("left", "right", "down")} == {
        str(data["first"][0])
    }
    for name in ("ZeRO-2", "fully sharded"):
        stored = space.storage(found[name])
        assert not any(layout.is_replicated for layout in stored.values())
    kept, again = (price(space.problem, found[name]) for name in ("ZeRO-2", "fully sharded"))
    assert kept[0] < again[0]
    assert kept[1] > again[1]
