"""Plans costed again: what the search said, what an edit changes, what cannot be."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.plan import PlanError
from shardwright.machine.measurement import Measured
from shardwright.plan_io.files import save_plan
from shardwright.plan_io.plan_text import plan_from_json
from shardwright.planner.recost import additive, operator_seconds, recosted
from shardwright.rules.analysis import analyze

MACHINE = sw.Machine.preset("4xcpu")
SKEWED = replace(MACHINE, arrival_skew_seconds=5e-3)
MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())


class Net(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def graph():
    return sw.capture(Net(), (torch.zeros(64, 32),))


@pytest.fixture(scope="module")
def front(graph):
    return sw.search(graph, MACHINE, optimizer="adamw", micro_batches=(1, 2))


def again(plan, graph, front, machine=MACHINE):
    return recosted(plan, graph, machine, "adamw", front)


def test_the_seconds_of_operators_are_those_of_a_plan(graph, front):
    for machine in (MACHINE, replace(MACHINE, device=replace(MACHINE.device, units=3))):
        for plan in (*front, *front.baselines):
            whole = additive(plan, graph, analyze(graph), machine, "adamw", front)
            seconds = operator_seconds(plan, graph, analyze(graph), machine)
            assert seconds == pytest.approx(sum(op.seconds for op in whole.ops), rel=1e-9)


def test_plans_of_the_search_cost_what_the_search_said(graph, front):
    plans = [*front, *front.baselines]
    assert any(op.segment for plan in plans for op in plan.ops), "some are recomputed"
    assert any(p.regathered for plan in plans for p in plan.parameters)
    assert any(plan.micro_batches > 1 for plan in plans)
    for plan in plans:
        found = again(plan, graph, front)
        settled = front.settled(plan)
        assert found.step_seconds == pytest.approx(settled.step_seconds, rel=1e-9)
        assert found.peak_bytes == settled.peak_bytes
        assert found.layouts == plan.layouts
        assert set(found.transfers) == set(plan.transfers)
        assert [op.splits for op in found.ops] == [op.splits for op in plan.ops]
        assert found.lower_bound_seconds <= found.step_seconds


class Branches(nn.Module):
    """Layers of two residual branches; the second is wider."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, n), nn.GELU(), nn.Tanh(), nn.Linear(n, 32)
            )
            for n in [64, 128] * 6
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_plans_of_an_exact_search_that_recompute_parts_of_layers_cost_what_it_said():
    """One plan of each number of segments."""
    graph = sw.capture(Branches(), (torch.zeros(64, 32),))
    options = {"exact": True, "micro_batches": (1,)}
    found = sw.search(graph, sw.Machine.preset("1xcpu"), optimizer="sgd", **options)
    known = {max(op.segment for op in plan.ops): plan for plan in found}
    assert max(known) > 6  # segments are pairs of branches, or single ones
    for plan in known.values():
        other = recosted(plan, graph, sw.Machine.preset("1xcpu"), "sgd", found)
        settled = found.settled(plan)
        assert other.step_seconds == pytest.approx(settled.step_seconds, rel=1e-9)
        assert other.peak_bytes == settled.peak_bytes


@pytest.mark.parametrize("measured", [None, MEASURED], ids=["adding up", "settled"])
def test_plans_of_a_search_with_skew_cost_what_it_said(graph, measured):
    # Settled plans pay for waits that tables charge nothing for, as one more costs nothing then.
    power = 1.0 if measured else 0.5
    skewed = replace(SKEWED, measured=measured, arrival_skew_power=power)
    found = sw.search(graph, skewed, optimizer="adamw", micro_batches=(1, 2))
    plans = [*found, *found.baselines]
    assert {plan.micro_batches for plan in plans} == {1, 2}
    for plan in plans:
        other = again(plan, graph, found, skewed)
        assert other.step_seconds == pytest.approx(found.settled(plan).step_seconds, rel=1e-9)
        waits = len([t for t in plan.transfers if any("all_" in c for c in t.collectives)])
        without = again(plan, graph, found, replace(MACHINE, measured=measured))
        assert (other.step_seconds > without.step_seconds) == (waits > 0)
    (kcut,) = sw.search(graph, skewed, method="kcut")
    other = again(kcut, graph, found, skewed)
    assert kcut.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)


def test_pipelines_pay_for_waits_in_tables(graph):
    """Nothing is added to them afterwards, so all of it is there, whatever one more costs."""
    even = []
    for skew in (0.0, 5e-3):
        machine = replace(
            MACHINE, measured=MEASURED, arrival_skew_seconds=skew, arrival_skew_power=1.0
        )
        found = sw.search(graph, machine, stages=[2], micro_batches=[2])
        (plan,) = (plan for plan in found.baselines if plan.name == "even pipeline")
        even.append(plan)
    without, late = even
    assert late.step_seconds > without.step_seconds


def test_an_edit_by_hand_is_followed(graph, front, tmp_path):
    (plan,) = (b for b in front.baselines if b.name == "data parallel")
    save_plan(plan, tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    first = data["parameters"][0]
    first[1], first[4] = "dp:S(0)", "regathered"
    data["ahead"], data["separates_gathers"] = 3, True
    found = again(plan_from_json(json.dumps(data)), graph, front)
    assert (found.ahead, found.separates_gathers) == (3, True)
    assert str(found.layouts[first[0]]) == "dp:S(0)"
    gathers = [t for t in found.transfers if t.value == first[0]]
    assert {c.split()[0] for t in gathers for c in t.collectives} >= {"all_gather"}
    assert not [t for t in plan.transfers if t.value == first[0] and "all_gather" in str(t)]
    assert found.peak_bytes < front.settled(plan).peak_bytes


def test_another_machine_gives_other_costs(graph, front):
    slow = replace(
        MACHINE, device=replace(MACHINE.device, bytes_per_s=MACHINE.device.bytes_per_s / 2)
    )
    assert again(front[0], graph, front, slow).step_seconds > front[0].step_seconds


def edited(plan, **changes):
    first, *others = plan.ops
    return replace(plan, ops=(replace(first, **changes), *others))


def test_what_cannot_be_is_named(graph, front):
    (plan,) = (b for b in front.baselines if b.name == "data parallel")
    name = plan.parameters[0].name
    with pytest.raises(PlanError, match="nowhere"):
        again(edited(plan, tiling=("nowhere",)), graph, front)
    segments = next(p for p in (*front, *front.baselines) if any(op.segment for op in p.ops))
    inside = [op for op in segments.ops if op.segment]
    ops = tuple(replace(op, segment=0) if op is inside[0] else op for op in segments.ops)
    with pytest.raises(PlanError, match="together or not at all"):
        again(replace(segments, ops=ops), graph, front)
    last = replace(plan.ops[-1], segment=1)
    with pytest.raises(PlanError, match="cannot be recomputed"):
        again(replace(plan, ops=(*plan.ops[:-1], last)), graph, front)
    with pytest.raises(PlanError, match=f"parameter {name} cannot be stored"):
        partial = replace(plan.parameters[0], layout=_layout(plan, "P"))
        again(replace(plan, parameters=(partial, *plan.parameters[1:])), graph, front)
    with pytest.raises(PlanError, match="is for 4 devices, 2xcpu has 2"):
        again(plan, graph, front, sw.Machine.preset("2xcpu"))


def _layout(plan, text):
    from shardwright.ir.layout import Layout

    return Layout.parse(f"dp:{text}", plan.mesh)


def test_no_device_is_left_without_a_part(front, graph):
    (plan,) = (b for b in front.baselines if b.name == "data parallel")
    wide = Mesh((("dp", 128),))
    ops = tuple(replace(op, layout=replace(op.layout, mesh=wide)) for op in plan.ops)
    machine = sw.Machine.preset("128xcpu")
    with pytest.raises(PlanError, match="leaves a device without a part"):
        again(replace(plan, mesh=wide, ops=ops), graph, front, machine)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": [2], "micro_batches": [4]},
        {"stages": [4], "micro_batches": [4], "allow_async": True},
    ],
    ids=["two stages", "four stages"],
)
def test_pipelines_cost_what_the_search_said(graph, options):
    for machine in (MACHINE, replace(SKEWED, measured=MEASURED)):
        found = sw.search(graph, machine, optimizer="adamw", **options)
        plans = [p for p in (*found, *found.baselines) if p.pipeline is not None]
        assert {plan.stages for plan in plans} >= {options["stages"][0]}
        for plan in plans:
            other, settled = again(plan, graph, found, machine), found.settled(plan)
            assert other.step_seconds == pytest.approx(settled.step_seconds, rel=1e-9), (
                plan.schedule
            )
            assert other.peak_bytes == settled.peak_bytes
            assert other.cuts == plan.cuts and other.schedule == plan.schedule
            assert other.receive_seconds == pytest.approx(plan.receive_seconds)
            assert other.layouts == plan.layouts


@pytest.fixture(scope="module")
def staged(graph):
    """A search of pipelines, and its even one."""
    found = sw.search(graph, MACHINE, optimizer="adamw", stages=[2], micro_batches=[4])
    return found, next(plan for plan in found.baselines if plan.name == "even pipeline")


def test_stages_may_be_cut_elsewhere_and_run_in_another_order(graph, staged):
    front, plan = staged
    place = {op.name: i for i, op in enumerate(graph.ops)}
    layer = next(i for i, op in enumerate(graph.ops) if op.source.module.startswith("layers.1"))
    uneven = again(replace(plan, cuts=(graph.ops[layer].name,)), graph, front)
    assert place[uneven.cuts[0]] == layer < place[plan.cuts[0]]
    even = front.settled(plan)
    assert uneven.step_seconds != even.step_seconds and uneven.peak_bytes < even.peak_bytes
    same = again(replace(plan, schedule="GPipe"), graph, front)
    assert same.schedule == "GPipe" and same.peak_bytes > even.peak_bytes


@pytest.mark.parametrize(
    "cut, said",
    [
        ("nowhere", "begins with nowhere, which is no operator"),
        (0, "is empty, or comes before an earlier one"),
        (-1, "has no trained parameter of its own"),
    ],
)
def test_cuts_that_cannot_be_are_named(graph, staged, cut, said):
    front, plan = staged
    name = cut if isinstance(cut, str) else graph.ops[cut].name
    with pytest.raises(PlanError, match=said):
        again(replace(plan, cuts=(name,)), graph, front)
    with pytest.raises(PlanError, match="cannot run: 1F1B has one stage for each"):
        again(replace(plan, cuts=(*plan.cuts, graph.ops[-1].name)), graph, front)
