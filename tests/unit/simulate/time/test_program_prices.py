"""Prices of step programs: of the plan's operators, of the machine's links; and their sums."""

from collections import defaultdict
from dataclasses import replace
from unittest import mock

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.plan import Phase
from shardwright.ir.redistribution import Collective
from shardwright.machine.presets import preset
from shardwright.machine.topology import contention_of, crossed_levels, links
from shardwright.program.instructions import Move
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Part, Transfer
from shardwright.program.step.lower.purposes import Purpose
from shardwright.program.step.lower.rank_steps import passes_named, step_program
from shardwright.rules.analysis import analyze
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.costs.copies import packing_seconds
from shardwright.simulate.time import program_prices
from shardwright.simulate.time.program_prices import (
    hidden_of,
    op_seconds,
    prices_of,
    seconds_of_transfers,
    shared_links,
    transfer_seconds,
)
from shardwright.simulate.time.step_program import OpSeconds, simulated
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(3)
ANALYSIS = analyze(GRAPH)
MESHES = [Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2")]
MACHINE = replace(preset("4xH100"), overlap=0.0)


def frontier(machine=MACHINE, count=1):
    return search(GRAPH, machine, PlanOptions.of(meshes=MESHES, micro_batches=(count,)))


def seconds(plan, machine, passes="all"):
    decisions = read_plan(plan, GRAPH, ANALYSIS)
    program = step_program(GRAPH, ANALYSIS, decisions, 0, passes_named(passes))
    prices = prices_of(plan, GRAPH, machine)
    return simulated(program, prices, plan.devices, plan.micro_batches).seconds


def test_whole_batches_that_hide_nothing_take_about_their_serial_sum():
    """They differ by what tables leave out: launches of partly filled buckets, copies into them."""
    found = frontier()
    for plan in (*found, *found.baselines):
        assert seconds(plan, MACHINE) == pytest.approx(plan.added_seconds, rel=0.07), plan


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_where_nothing_is_in_buckets_a_step_is_its_serial_sum(overlap):
    machine = replace(MACHINE, overlap=overlap)
    named = {plan.name: plan for plan in frontier(machine).baselines}
    plan = named["tensor parallel"]
    assert any(t.phase is Phase.BACKWARD for t in plan.transfers)
    assert seconds(plan, machine) == pytest.approx(plan.added_seconds, rel=1e-4)


def test_operators_of_a_micro_batch_take_their_part():
    for plan in frontier(count=2).baselines:
        prices = op_seconds(plan, GRAPH, MACHINE)
        ops = sum(one.forward + one.backward for one in prices.values())
        local = [
            t.seconds
            for t in plan.transfers
            if {one.split(" ")[0] for one in t.collectives} <= {"slice", "mask", "embed"}
        ]
        assert 2 * ops == pytest.approx(sum(op.seconds for op in plan.ops) + sum(local))
        assert prices["layers.0.left"].module == "layers.0"


def test_what_is_sent_inside_of_an_operator_belongs_to_its_pass():
    plan = frontier().baselines[0]
    name = plan.ops[0].name
    sent = {(name, False): [("dp", 1.0)], (name, True): [("tp", 2.0), ("dp", 3.0)]}
    kept = {(name, False): 0.5, (name, True): 0.25}
    given = defaultdict(list, sent), defaultdict(float, kept)
    with mock.patch.object(program_prices, "seconds_of_transfers", lambda *_: given):
        found = op_seconds(plan, GRAPH, MACHINE)
    forward, backward = plan.ops[0].forward_seconds + 0.5, plan.ops[0].backward_seconds + 0.25
    inner = (("dp", 1.0),), (("tp", 2.0), ("dp", 3.0))
    assert found[name] == OpSeconds(forward, backward, plan.ops[0].source.module, *inner)


def test_transfers_of_operators_that_were_left_out_have_no_seconds():
    plan = next(one for one in frontier().baselines if one.name == "tensor parallel")
    local = replace(plan.transfers[0], collectives=("slice tp",), seconds=1.0)
    first, last = GRAPH.ops[0].name, GRAPH.ops[-1].name
    plan = replace(plan, transfers=tuple(replace(local, consumer=one) for one in (first, last)))
    few = replace(GRAPH, ops=GRAPH.ops[:4], outputs=GRAPH.ops[3].outputs)
    assert {name for name, _ in seconds_of_transfers(plan, GRAPH)[1]} == {first, last}
    assert {name for name, _ in seconds_of_transfers(plan, few)[1]} == {first}


def part(value, kind, whole, channel="dp", dtype="float32"):
    gathers, tile = kind is Collective.ALL_GATHER, whole[0] // 4
    sent = (tile, *whole[1:]) if gathers else whole
    move = Move(channel, kind, whole, 0 if gathers else -1, -1 if gathers else 0, 0, tile, True)
    return Part(value, f"{value}/there", sent, (), move, sent, dtype)


@pytest.mark.parametrize(
    "kind, sent, got",
    [
        (Collective.ALL_GATHER, 1, 4),
        (Collective.REDUCE_SCATTER, 4, 1),
        (Collective.ALL_REDUCE, 4, 4),
    ],
)
def test_a_bucket_pays_one_launch_and_the_copies_into_it(kind, sent, got):
    mesh = MESHES[0]
    price = step_price(kind, links(MACHINE, mesh)[0], MACHINE)
    size = 1024 * 256 * 4  # bytes of a fourth of a part
    one = Transfer(kind, "dp", (part("x", kind, (1024, 1024)),), "t")
    alone = transfer_seconds(one, mesh, MACHINE)
    assert alone.link == pytest.approx(price.seconds(sent * size, got * size))
    assert alone.fill == alone.empty == 0
    two = replace(one, parts=(*one.parts, part("y", kind, (1024, 1024))))
    both = transfer_seconds(two, mesh, MACHINE)
    assert both.link == pytest.approx(price.seconds(2 * sent * size, 2 * got * size))
    assert both.link < 2 * alone.link
    moved = 2 * (sent + got) * size if kind is Collective.ALL_GATHER else 2 * sent * size
    handled = 2 if kind is Collective.ALL_GATHER else 1
    packed = 2 * packing_seconds(float(moved), handled, MACHINE.device)
    if kind is Collective.ALL_REDUCE:  # one kernel joins both
        packed = packing_seconds(2.0 * moved, handled, MACHINE.device)
    assert both.fill + both.empty == pytest.approx(packed)


def test_results_hide_and_the_rest_as_far_as_the_machine_says():
    machine = replace(MACHINE, overlap=0.6, gather_overlap=0.2)
    gather, scatter, total = (
        Transfer(kind, "dp", (part("x", kind, (8, 8)),), "t")
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)
    )
    assert hidden_of(total, Purpose.RESULT, machine) == 1.0
    assert hidden_of(total, Purpose.GRADIENT, machine) == 0.6
    assert hidden_of(scatter, Purpose.GRADIENT, machine) == 0.2
    assert hidden_of(gather, Purpose.COPY, machine) == 0.2


def test_axes_share_a_link_where_they_cross_one_level():
    hosts = preset("2x8xA100")
    split, inside = Mesh.parse("dp=2 tp=8"), Mesh.parse("dp=4 tp=4")
    assert crossed_levels(hosts, split) == ({1}, {0})
    assert crossed_levels(hosts, inside) == ({0, 1}, {0})
    assert shared_links(split, hosts) == {"dp": "dp", "tp": "tp"}
    assert contention_of(hosts, split, "dp", "tp") == 0 < contention_of(hosts, inside, "dp", "tp")
    assert shared_links(inside, hosts) == {"dp": "dp tp", "tp": "dp tp"}
    free = replace(hosts, contention=0.5)
    assert shared_links(inside, free) == {"dp": "dp", "tp": "tp"}
    plan = next(p for p in frontier().baselines if str(p.mesh) == "dp=2 tp=2")
    assert prices_of(plan, GRAPH, MACHINE).contention("dp", "tp") == 1.0
    assert prices_of(plan, GRAPH, replace(MACHINE, contention=0.3)).contention("dp", "tp") == 0.3
