"""Inputs of recomputed segments on the host: which, at what cost, and the search over states."""

from dataclasses import replace

import numpy as np
import pytest

import shardwright as sw
from benchmarks.saved_tensors.run import compared
from shardwright.ir.layout import Mesh
from shardwright.machine.presets import preset
from shardwright.planner.plans.plan_builder import PlanBuilder
from shardwright.planner.space_factory import SpaceFactory
from tests.harness import models

MACHINE = preset("2xH100")


@pytest.fixture(scope="module")
def graph():
    model, batch = models.small_llama(layers=5, hidden=32, heads=4, rows=8, length=8)
    return sw.capture(model, (), batch)


def with_device(**changes):
    return replace(MACHINE, device=replace(MACHINE.device, **changes))


def space_of(graph, machine, count=1):
    factory = SpaceFactory(graph, recompute=True)
    return factory.space(machine, Mesh.parse("dp=2"), "adamw", count, host=True)


def test_copies_cost_what_the_segment_does_not_hide(graph):
    launches = 2 * MACHINE.device.launch_seconds
    space, _ = space_of(graph, MACHINE)
    assert [one.segment for one in space.host_inputs] == list(range(len(space.host_inputs)))
    assert len(space.host_inputs) == 3  # of five layers, which fold: one stands for three
    one = space.host_inputs[0].choice
    assert (one.memory[:, 0] > 0).all() and not one.memory[:, 1].any()
    assert one.time[:, 1] == pytest.approx(launches)
    slow, _ = space_of(graph, with_device(host_bytes_per_s=1e4))
    copies = one.memory[:, 0] / 1e4
    seconds = slow.host_inputs[0].choice.time[:, 1]
    assert (seconds < 2 * copies + launches).all()
    assert seconds == pytest.approx(2 * copies, rel=0.1)
    little, _ = space_of(graph, with_device(host_memory_bytes=60000))
    assert np.isinf(little.host_inputs[0].choice.time[:, 1]).any()  # whole, but not half of it
    assert np.isfinite(little.host_inputs[0].choice.time[:, 1]).any()


def test_a_plan_says_which_segments_keep_their_input_on_the_device(graph):
    space, short = space_of(graph, MACHINE)
    builder = PlanBuilder(space, graph, short, "adamw")
    options = dict.fromkeys(space.op_nodes, 0)
    storage = dict.fromkeys((leaf.name for leaf in space.parameters), 0)
    choice = list(space.folded.expand(space.assignment(options, storage, recompute=True)))
    kept = space.prices.point(tuple(choice))
    assert builder.plan(kept, 0, 0.0, "kept", ()).offload == ()
    switches = sorted(builder._hosts)
    for switch in switches[1:]:
        choice[builder._hosts[switch]] = 1
    moved = space.prices.point(tuple(choice))
    plan = builder.plan(moved, 0, 0.0, "moved", ())
    assert plan.offload == ("activations",)
    assert len(plan.on_device) == 1 and len({op.segment for op in plan.ops} - {0}) == 5
    assert moved.time > kept.time and moved.memory < kept.memory
    last = list(kept.choice)
    last[[*builder._hosts.values()][-1]] = 1
    plan = builder.plan(space.prices.point(tuple(last)), 0, 0.0, "last", ())
    assert plan.offload == () and plan.on_device == ()  # it runs again at once, so it stays
    assert sw.Plan.of(plan).to_json() == sw.Plan.from_json(sw.Plan.of(plan).to_json()).to_json()


def test_the_search_over_states_equals_a_mixed_integer_program():
    found = [compared(seed) for seed in range(12)]
    assert sum(one["moved"] for one in found) > 3  # frontiers with inputs on the host
    for one in found:
        assert one["error"] < 1e-9
        assert one["bound"] < 1e-9
