"""The k-cut as `search` gives it: a plan like any other, beside the baselines."""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import OptionsError, PlanOptions
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.kcut.cutter import Cutter
from tests.harness.layered_graphs import residual_layers
from tests.harness.plans import added_seconds

MACHINE = preset("2x6xA100")
GRAPH = residual_layers(3)


@pytest.fixture(scope="module")
def frontier():
    return search(GRAPH, MACHINE, PlanOptions.of(method="kcut"))


def test_the_frontier_is_the_k_cut_on_axes_of_prime_size(frontier):
    (plan,) = frontier
    assert (plan.name, str(plan.mesh)) == ("k-cut", "k1=2 k2=3 k3=2")
    cutter = Cutter(GRAPH, MACHINE)
    cuts = cutter.cut(plan.mesh)
    rules = cutter.analysis.rules
    for op in GRAPH.ops:
        splits = [str(rules[op.name].choices()[k]) for k in cuts.tilings[op.name]]
        assert plan.tilings[op.name] == tuple(splits)
    assert f"{cuts.bytes:,.0f} bytes in all devices by SoyBean's measure" in plan.notes[0]
    weights = sum(GRAPH.tensor[p.name].bytes for p in plan.parameters)
    assert f"would be {2 * 11 * weights:,} bytes" in plan.notes[0]


def test_it_is_costed_like_every_plan(frontier):
    (plan,) = frontier
    returned = plan.step_seconds - added_seconds(plan, MACHINE)  # bringing the loss to every device
    assert -1e-12 < returned < 1e-3
    assert plan.peak_bytes > sum(p.bytes for p in plan.parameters)
    assert 0 < plan.lower_bound_seconds <= plan.step_seconds
    assert plan_from_json(plan_to_json(plan)) == plan


def test_baselines_and_bound_are_those_of_the_joint_search(frontier):
    joint = search(GRAPH, MACHINE)
    for mine, theirs in zip(frontier.baselines, joint.baselines, strict=True):
        assert replace(mine, lower_bound_seconds=theirs.lower_bound_seconds) == theirs
    (plan,) = frontier
    assert not frontier.is_late, "the joint search has no time, and the cut has"
    best = min(p.step_seconds for p in joint if p.peak_bytes <= plan.peak_bytes)
    assert 0.5 * joint[0].step_seconds < plan.lower_bound_seconds <= best


def test_a_mesh_that_is_given_is_cut_axis_by_axis():
    mesh = Mesh.parse("dp=2 tp=6")
    (plan,) = search(GRAPH, MACHINE, PlanOptions.of(method="kcut", meshes=[mesh]))
    assert plan.mesh == mesh


def test_one_device_needs_no_cut():
    (plan,) = search(GRAPH, MACHINE.with_devices(1), PlanOptions.of(method="kcut"))
    assert plan.devices == 1 and not plan.transfers
    assert " 0 bytes in all devices" in plan.notes[0]


def test_progress_tells_every_cut():
    told = []
    search(
        GRAPH,
        MACHINE,
        PlanOptions.of(method="kcut"),
        progress=lambda text, part: told.append((text, part)),
    )
    assert [text for text, _ in told] == ["cut k1=2", "cut k2=3", "cut k3=2", "done"]
    assert [part for _, part in told] == pytest.approx([0, 1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"method": "luck"}, "method 'luck' is not known; choose one of joint, kcut"),
        ({"method": "kcut", "exact": True}, "is not `exact` and takes no constraints, no"),
        ({"method": "kcut", "allow_async": True}, "no `allow_async`"),
        ({"method": "kcut", "stages": None}, "no stages"),
        ({"method": "kcut", "micro_batches": (1, 2)}, "no micro-batches"),
        ({"method": "kcut", "constraints": ["pin *=k1:batch"]}, "takes no constraints"),
        ({"method": "kcut", "meshes": [Mesh.parse("dp=2")] * 2}, "'kcut' cuts one mesh"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, message):
    with pytest.raises(OptionsError, match=message):
        search(GRAPH, MACHINE, PlanOptions.of(**asked))
