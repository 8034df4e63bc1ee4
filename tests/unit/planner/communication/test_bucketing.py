"""Parameters that may share a bucket with others, and those that are gathered alone."""

import numpy as np

from shardwright.ir.layout import PARTIAL, REPLICATE, Layout, Mesh, Shard
from shardwright.rules.rule import Split
from tests.harness.cost_queries import redistribution_seconds
from tests.harness.small_graphs import toy_machine
from tests.unit.planner.tables.test_model import axis, layers, model, twice


def test_parameters_that_travel_together_share_what_a_message_costs():
    costs = model(graph=layers(4))  # of which four fill a bucket
    first, second = costs.graph.ops[0], costs.graph.ops[2]
    table = costs.edge("w1", [axis("R"), axis("S(0)")], second, [1], [(Split("m"),)])
    summed = (2 + 2 * 1) / 4 + 1024 / 16
    there = (2 + 1) / 4 + 512 / 16 + (1 + 2 * (512 + 1024) / 4096)  # in and out of the buffer
    back = (2 + 1) / 4 + 512 / 16 + (1 + 2 * 1024 / 4096)
    assert table.seconds[:, 0].tolist() == [summed, there + back]
    again = np.array([True])
    twice = costs.edge("w1", [axis("S(0)")], second, [1], [(Split("m"),)], again)
    assert twice.seconds == there + there + back
    parts = costs.transfers("w1", axis("S(0)"), second, [1], (Split("m"),), regathered=True)
    assert [part.seconds for part in parts] == [there, there, back]
    # In what is recomputed every copy is gathered alone.
    codes = costs.codes("w0", [axis("S(0)")])
    place = costs.columns(first, [(Split("m"),)])
    alone = costs.model.edge("w0", codes, first, [1], again, True).seconds[:, place]
    assert alone == 2 * (2 + 1 + 512 / 16) + (2 + 1 + 512 / 16)


def test_what_is_gathered_in_several_steps_or_read_twice_goes_alone():
    mesh = Mesh.parse("dp=2 tp=2")
    costs = model(mesh, graph=layers(4), devices=4)
    second = costs.graph.ops[2]
    both = Layout(mesh, (Shard(0), Shard(0)))
    gathers = [2 + 1 + 256 / 16, 2 + 1 + 512 / 16]
    seconds = costs.edge("w1", [both], second, [1], [(Split("m"), None)]).seconds
    assert seconds > sum(gathers)
    reread = model(graph=twice())
    square = reread.graph.ops[1]
    assert reread.edge("y", [axis("S(0)")], square, [0], [(None,)]).seconds == 2 + 1 + 512 / 16 + (
        1 + 2 * 512 / 4096
    )


def test_a_dimension_split_along_two_axes_is_gathered_along_one_of_them_alone():
    mesh = Mesh.parse("dp=2 tp=2")
    costs = model(mesh, graph=layers(4), devices=4)
    second, atoms = costs.graph.ops[2], ((16,), (16,))
    stored, read, gradient = (
        Layout(mesh, (along, Shard(1))) for along in (Shard(1), REPLICATE, PARTIAL)
    )
    found = costs.edge("w1", [stored], second, [1], [(Split("m"), Split("n"))]).seconds
    machine = toy_machine(devices=4)
    there, back = (
        redistribution_seconds(atoms, 4, *ends, machine)
        for ends in ((stored, read), (gradient, stored))
    )
    assert found == there + back
    apart = Layout(mesh, (Shard(0), Shard(1)))
    there, back = (
        redistribution_seconds(atoms, 4, *ends, machine)
        for ends in ((apart, read), (gradient, apart))
    )
    found = costs.edge("w1", [apart], second, [1], [(Split("m"), Split("n"))]).seconds
    assert found < there + back, "shares a bucket"
