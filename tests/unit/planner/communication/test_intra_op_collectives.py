"""What sharing a causal attention costs: evenly divided work, swaps of halves, rounds of a ring."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Phase
from shardwright.ir.redistribution import Exchange
from shardwright.machine.presets import preset
from shardwright.machine.topology import links
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.costs.compute import forward_seconds
from tests.unit.tracing.own_operators.test_causal_rows import captured


@pytest.fixture
def asked():
    graph = captured()
    return graph, analyze(graph), preset("8xV100")


def model_of(asked, *, overlap=0.0):
    graph, analysis, machine = asked
    return CostModel(graph, analysis, replace(machine, overlap=overlap), Mesh.parse("cp=5"))


def option(model, word):
    (op,) = model.graph.ops
    rule = model.analysis.rules[op.name]
    return op, model.options(op).find(rule, parse_tiling(rule, (word,)))


def test_halves_make_causal_work_even(asked):
    model = model_of(asked)
    device = replace(
        model.machine.device, bytes_per_s=1e30, launch_seconds=0.0, issue_seconds=0.0, units=0
    )
    seconds = {}
    for word in ("-", "l", "l~z", "l~s~z"):
        op, k = option(model, word)
        sizes = model.options(op).sizes[:, k : k + 1]
        seconds[word] = float(forward_seconds(model.meshless.workload(op), sizes, device)[0])
    assert seconds["l"] == pytest.approx(seconds["-"] / 5 * 1.8)  # the last of five
    assert seconds["l~z"] == pytest.approx(seconds["-"] / 5)
    assert seconds["l~s~z"] == pytest.approx(seconds["-"] / 5)


def test_what_is_exchanged_is_listed_with_its_price(asked):
    model = model_of(asked)
    for word, expected in (("l", {}), ("l~z", {}), ("l~s~z", {"ring"})):
        op, k = option(model, word)
        moved = model.internal_transfers(op, k)
        assert {t.collectives[0].split()[0] for t in moved} == set(expected)
        assert all(t.collectives[0].split()[1] == "cp" for t in moved)
        work, options = model.meshless.workload(op), model.options(op)
        own = model.measure.operator(work, options.sizes)[k]
        total = model.operator(op).seconds[k]
        assert total == pytest.approx(own + sum(t.seconds for t in moved))


def test_a_ring_that_is_recomputed_goes_round_once_more(asked):
    model = model_of(asked)
    op, k = option(model, "l~s~z")
    phases = [t.phase for t in model.internal_transfers(op, k, True)]
    assert phases.count(Phase.RECOMPUTE) == phases.count(Phase.FORWARD) == 1


def test_a_block_is_sent_to_all_other_devices_and_its_gradient_also_home(asked):
    """Of five devices: keys and values make four hops, their gradients five (Liu et al., 2023)."""
    graph = captured(requires_grad=True)
    model = model_of((graph, analyze(graph), asked[2]))
    op, k = option(model, "l~s~z")
    seconds = {
        t.phase: t.seconds
        for t in model.internal_transfers(op, k)
        if t.collectives[0].startswith("ring")
    }
    operands = model.meshless.workload(op).operands[1:3]
    sizes = model.options(op).sizes[:, k : k + 1]
    block = sum(int(one.local_bytes(sizes)[0]) for one in operands)
    price = step_price(Exchange.RING, links(model.machine, model.mesh)[0], model.machine)
    hop, gradient = (price.seconds(size, size) for size in (block, block))  # both in float32
    assert model.graph.tensor[op.operands[1]].dtype == "float32"
    assert seconds[Phase.FORWARD] == pytest.approx(4 * hop)
    assert seconds[Phase.BACKWARD] == pytest.approx(4 * hop + 5 * gradient)


def test_rounds_hide_behind_what_is_computed(asked):
    _, k = option(model_of(asked), "l~s~z")
    found = []
    for overlap in (0.0, 0.5, 1.0):
        model = model_of(asked, overlap=overlap)
        found.append(float(model.operator(model.graph.ops[0]).seconds[k]))
    assert found[0] > found[1] > found[2]


def test_a_ring_holds_a_part_of_keys_and_values(asked):
    model = model_of(asked)
    (op,) = model.graph.ops
    _, gathered = option(model, "l")
    _, ring = option(model, "l~s~z")
    sizes = model.options(op).sizes[:, [gathered, ring]]
    keys = model.meshless.workload(op).operands[1].local_bytes(sizes)
    assert np.array_equal(keys, [keys[0], keys[0] // 5])
