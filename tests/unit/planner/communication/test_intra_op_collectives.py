"""What sharing a causal attention costs: evenly divided work, swaps of halves, rounds of a ring."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Phase
from shardwright.machine.presets import preset
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.simulate.costs.compute import forward_seconds
from tests.unit.tracing.decompose.test_causal_rows import captured


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
    for word, expected in (("l", {}), ("l~z", {"swap"}), ("l~s~z", {"swap", "ring"})):
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
    assert phases.count(Phase.RECOMPUTE) == phases.count(Phase.FORWARD) == 2


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
