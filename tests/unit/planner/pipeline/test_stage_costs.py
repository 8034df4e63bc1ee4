"""What counts once in the memory of a stage, and what for each micro-batch in flight."""

import numpy as np

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.machine.topology import links
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.pipeline.stage_costs import Offer, StageCosts
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.tables.layout_codes import WHOLE
from tests.harness import models


def test_kept_copies_of_parameters_count_once_whatever_is_in_flight():
    model, batch = models.small_llama(2, 16, 4, 8, 16)
    graph = sw.capture(model, (), batch)
    machine = preset("4xH100")
    loop = MeshLoop(SpaceFactory(graph, recompute=True), machine)
    writer = loop.writer(loop.factory, Mesh.parse("dp=2"), 4, staged=True)
    space, found = writer.space, []
    for regathered in (False, True):
        storage = {
            leaf.name: stored.find(code, regathered=regathered)
            for leaf, stored in zip(space.parameters, space.stored, strict=True)
            for code in [next((c for c in stored.codes.tolist() if c != WHOLE), WHOLE)]
        }
        found.append(space.assignment(dict.fromkeys(space.op_nodes, 0), storage))
    running = Offer(writer, ()).running_of(np.array(found, np.int64))
    ends = np.array([0, len(graph.ops)])
    link = links(machine, Mesh.parse("pp=2 dp=2"))[0]
    costs = StageCosts(running, StageCuts(graph), ends, link)
    one, four = (costs.bytes(count)[:, 0, 1] for count in (1, 4))
    assert one[0] > one[1]  # copies
    assert one[0] - one[1] == four[0] - four[1]
    assert (four > one).all()  # activations
