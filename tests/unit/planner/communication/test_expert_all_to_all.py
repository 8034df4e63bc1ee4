"""What rows cost that travel to their experts: bytes, seconds and memory, at the stated skew."""

from dataclasses import replace
from itertools import combinations
from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.plan import Phase
from shardwright.ir.redistribution import Exchange
from shardwright.machine.presets import preset
from shardwright.machine.topology import hop_links, links
from shardwright.planner.plans.expert_placement import expert_placement
from shardwright.planner.tables.model import CostModel
from shardwright.rules.analysis import analyze
from shardwright.rules.mixtures.group_limits import GroupLimit
from shardwright.rules.placements import parse_tiling
from shardwright.simulate.costs.collectives import step_price
from shardwright.simulate.costs.compute import forward_seconds
from shardwright.simulate.costs.expert_visits import visited_share
from shardwright.simulate.costs.workload import routed_bytes
from tests.harness.drawn_tensors import f, i, u
from tests.harness.operator_calls import CALLS, GATED, call

# 9 tokens of 6 numbers choose 2 of 5 experts, with 7 inner units, in float64.
ONE = next(one for one in CALLS if one.op.kind == "experts")
ANALYSIS = analyze(ONE.graph)
RULE = ANALYSIS.rules["y"]
MESH = Mesh.parse("dp=3 ep=2")
ROWS, WIDTH, ITEM = 9 * 2, 6, 8


def model(skew=1.25, mesh=MESH):
    return CostModel(ONE.graph, ANALYSIS, replace(preset("6xH100"), expert_skew=skew), mesh)


def option(costs, *words):
    options = costs.options(ONE.op)
    return options, options.find(RULE, parse_tiling(RULE, words))


def test_rows_of_the_busiest_device_are_sent_there_and_back():
    costs = model()
    _, k = option(costs, "n", "n>e")
    sent = costs.internal_transfers(ONE.op, k, again=True)
    assert [t.phase for t in sent] == [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD]
    assert {t.collectives for t in sent} == {("all_to_all ep",) * 2}
    # Three tokens, then two of them, choose twice; three of five experts have 0.6 · 1.25 of both.
    # Half of the experts are elsewhere: of two that a token chooses, both are with 0.5 · 1.5 / 4.
    rows = 2 * 2 * 2 * 0.75 * (1 - 0.5 * 1.5 / 4)
    choice = 2 * (4 + ITEM)  # the indices of its experts, and its scores
    assert {t.bytes for t in sent} == {ceil(rows * (WIDTH * ITEM + choice))}
    price = step_price(Exchange.ROWS, links(costs.machine, MESH)[1], costs.machine)
    for t in sent:
        moved = rows * (2 * WIDTH * ITEM + choice)
        assert t.seconds == pytest.approx(price.fixed + price.per_larger * ceil(moved))
    table = costs.operator(ONE.op)
    own = costs.measure.operator(costs.meshless.workload(ONE.op), costs.options(ONE.op).sizes)
    assert table.seconds[k] == pytest.approx(own[k] + sent[0].seconds + sent[2].seconds)


def test_tokens_with_many_experts_go_to_hosts_first():
    """Along an axis of two hosts, with four devices of each: two devices exchange, then four."""
    one = call(
        "shardwright.experts.default",
        *(f(24, 6), i(24, 3, below=16), u(24, 3), f(16, 14, 6), f(16, 6, 7), [True, True]),
        "transformers.grouped_mm_fallback.default",
        GATED,
    )
    analysis, mesh = analyze(one.graph), Mesh.parse("ep=8")
    rule = analysis.rules["y"]
    machine = replace(preset("2x4xH100"), expert_skew=1.0)
    costs = CostModel(one.graph, analysis, machine, mesh)
    k = costs.options(one.op).find(rule, parse_tiling(rule, ("n>e",)))
    forward, backward = costs.internal_transfers(one.op, k)
    assert forward.collectives == backward.collectives == ("all_to_all ep",) * 4
    between, within = hop_links(machine, mesh)[0]
    assert (between.ranks, within.ranks) == (2, 4) and between.bytes_per_s < within.bytes_per_s
    rows, choice = 24 * 3 / 8, 3 * (4 + ITEM)
    share = visited_share(16, 3, np.array([2.0, 8.0]))
    total = sum(
        price.fixed + price.per_larger * rows * part * (2 * WIDTH * ITEM + choice)
        for link, part in zip((between, within), share, strict=True)
        for price in [step_price(Exchange.ROWS, link, machine)]
    )
    assert forward.seconds == backward.seconds == pytest.approx(total, rel=1e-3)
    placed = expert_placement(costs, [(one.op, SimpleNamespace(tiling=("n>e",)))])
    assert placed == (1.0, 4)
    assert expert_placement(costs, [(one.op, SimpleNamespace(tiling=("n",)))]) == (0.0, 0)
    few = CostModel(ONE.graph, ANALYSIS, preset("2x2xH100"), Mesh.parse("ep=4"))  # two experts each
    assert expert_placement(few, [(ONE.op, SimpleNamespace(tiling=("n>e",)))]).host_devices == 0
    alone = CostModel(one.graph, analysis, preset("8xH100"), mesh)
    assert expert_placement(alone, [(one.op, SimpleNamespace(tiling=("n>e",)))]).host_devices == 0


def test_only_what_sends_rows_pays_for_it():
    costs = model()
    for words in (("-", "-"), ("n", "e"), ("e", "n"), ("m", "-")):
        assert costs.internal_transfers(ONE.op, option(costs, *words)[1]) == []
    costs = model(mesh=Mesh.parse("dp=2 ep=2"))
    both = costs.internal_transfers(ONE.op, option(costs, "n>e", "n>e")[1])
    assert [t.collectives[0] for t in both] == ["all_to_all dp", "all_to_all ep"] * 2


def test_loads_of_experts_are_the_number_that_follows_from_them():
    """Of five experts in this order, the first three have 7 of 10 rows, and four of them 9."""
    loads = (400.0, 200.0, 100.0, 200.0, 100.0)
    for mesh, words, held, share in (("ep=2", ("n>e",), 0.6, 0.7), ("dp=2", ("n",), 1.0, 1.0)):
        given = (model(skew, Mesh.parse(mesh)) for skew in (loads, share / held))
        first, other = (costs.operator(ONE.op) for costs in given)
        k = option(model(1.0, Mesh.parse(mesh)), *words)[1]
        assert first.seconds[k] == pytest.approx(other.seconds[k])
    table = model(loads, Mesh.parse("ep=2"))
    number = model(0.7 / 0.6, Mesh.parse("ep=2"))
    assert table.operator(ONE.op).seconds == pytest.approx(number.operator(ONE.op).seconds)


def test_results_are_sent_in_the_dtype_of_rows():
    """Scores in float32 make sums over experts wider, on the device that sent the rows."""
    work = model().meshless.workload(ONE.op)
    half = replace(work.operands[0], item_bytes=ITEM // 2)
    mixed = replace(work, operands=(half, *work.operands[1:]))
    sizes = np.array(work.sizes)[:, None]
    there, back = routed_bytes(mixed, sizes)
    assert there == back == routed_bytes(work, sizes)[0] / 2


@pytest.mark.parametrize("skew", [1.0, 1.25, 1.6])
def test_routed_rows_are_worked_on_by_those_who_hold_their_experts(skew):
    """Together they have what experts alone would: a device its experts' share of all rows."""
    costs = model(skew, Mesh.parse("ep=2"))
    work, device = costs.meshless.workload(ONE.op), replace(costs.machine.device, bytes_per_s=1e30)
    device = replace(device, launch_seconds=0.0, issue_seconds=0.0, units=0)
    options, routed = option(costs, "n>e")
    alone, whole = option(costs, "e")[1], option(costs, "-")[1]
    seconds = forward_seconds(work, options.sizes, device)
    # 5 of 9 tokens on the larger device, from two of them: 10 tokens at most.
    assert seconds[routed] == pytest.approx(seconds[alone] * 10 / 9, rel=0.05)
    assert seconds[alone] == pytest.approx(seconds[whole] * min(1, 0.6 * skew), rel=0.05)
    kept = costs.operator(replace(ONE.op, extra_saved=10**6)).bytes
    assert kept[routed] == pytest.approx(kept[alone] * 10 / 9, rel=1e-3)


def test_received_rows_are_workspace():
    """Rows that come and what is made of them, with gradients; 0.75 of 10 tokens' two rows."""
    costs = model(mesh=Mesh.parse("ep=2"))
    options, routed = option(costs, "n>e")
    sizes = dict(zip((f.name for f in RULE.factors), options.sizes[:, routed], strict=True))
    x = sizes["n"] * WIDTH * ITEM
    weights = sizes["e"] * (14 + 7) * WIDTH * ITEM
    chosen, scores = sizes["n"] * 2 * 8, sizes["n"] * 2 * ITEM
    held = 2 * (x + weights + scores + x) + chosen
    assert costs.workspace(ONE.op)[routed] == held + 2 * 2 * (20 * 0.75 * WIDTH * ITEM)


@pytest.mark.parametrize("limit", [GroupLimit(4, 2), GroupLimit(2, 1), GroupLimit(4, 3)])
@pytest.mark.parametrize("chosen", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_router_that_limits_groups_sends_tokens_to_fewer_devices(limit, chosen, devices):
    experts, size = 8, 8 // limit.groups
    every = [
        one
        for groups in combinations(range(limit.groups), limit.chosen)
        for one in combinations([e for e in range(experts) if e // size in groups], chosen)
    ]
    each = experts // devices
    visited = sum(len({e // each for e in one}) for one in every) / len(every)
    (share,) = visited_share(experts, chosen, np.array([devices]), limit)
    assert share == pytest.approx(visited / chosen)
    assert share <= visited_share(experts, chosen, np.array([devices]))[0] + 1e-12


@pytest.mark.parametrize("experts, chosen, devices", [(8, 2, 4), (8, 3, 2), (6, 6, 3), (9, 1, 3)])
def test_a_token_goes_once_to_each_device_with_experts_of_its_choice(experts, chosen, devices):
    each = experts // devices
    choices = list(combinations(range(experts), chosen))
    visited = sum(len({e // each for e in one}) for one in choices) / len(choices)
    share = visited_share(experts, chosen, np.array([1.0, devices]))
    assert share == pytest.approx([1 / chosen, visited / chosen])


def test_a_balanced_router_costs_less():
    balanced, uneven = model(1.0), model(1.6)
    k = option(balanced, "n", "n>e")[1]
    faster, slower = (costs.operator(ONE.op).seconds[k] for costs in (balanced, uneven))
    assert faster < slower
    assert np.array_equal(balanced.options(ONE.op).sizes, uneven.options(ONE.op).sizes)
