import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from shardwright.api import search_with as search
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.layout import Mesh
from shardwright.ir.options.constraints import parse_constraints
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.planner import _add_pipelines
from shardwright.planner.plans.candidate import Candidate
from shardwright.planner.space_factory import SpaceFactory
from shardwright.planner.tables.layout_codes import encode
from shardwright.planner.tables.model import CostModel
from shardwright.planner.tables.pricing import Pricing
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import parse_tiling
from shardwright.solve.elimination.eliminate import exact_frontier
from shardwright.solve.elimination.problem import Point
from shardwright.solve.frontier.fast import fast_frontier
from tests.harness.layered_graphs import residual_layers
from tests.harness.plans import added_seconds

MACHINE = preset("8xH100")


@pytest.fixture(scope="module")
def frontier():
    return search(residual_layers(7), MACHINE)


def priced_from_scratch(plan, graph, analysis=None, micro_batches=1):
    """Seconds and additive bytes of a plan, operator by operator over the whole graph."""
    analysis = analysis or analyze(graph)
    model = CostModel(
        graph, analysis, MACHINE, plan.mesh, Pricing(plan.optimizer, micro_batches=micro_batches)
    )
    rules, atoms = model.analysis.rules, model.analysis.atoms
    lies = {leaf.name: 0 for leaf in graph.leaves}
    again = {parameter.name: parameter.regathered for parameter in plan.parameters}
    seconds = held = 0
    for parameter, leaf in zip(plan.parameters, graph.leaves[1:], strict=True):
        lies[leaf.name] = encode(parameter.layout, atoms[leaf.name])
        table = model.parameter(leaf, np.array([lies[leaf.name]]))
        seconds, held = seconds + table.seconds[0], held + table.bytes[0]
    segments = {}
    for op in plan.ops:
        segments.setdefault(op.segment, set()).add(op.name)
    brought = set()
    for op, planned in zip(graph.ops, plan.ops, strict=True):
        options, rule = model.options(op), rules[op.name]
        k = options.find(rule, parse_tiling(rule, planned.tiling))
        together = segments[planned.segment] if planned.segment else ()
        table = model.operator(op, together, planned.kept)
        seconds, held = seconds + table.seconds[k], held + table.bytes[k]
        for i, value in enumerate(op.operands):
            want = int(options.operands[i, k]), int(options.grads[i, k])
            read = (value, op.kind, planned.segment, *want)
            if read not in brought:  # the two projections read one copy
                regathered = np.array([again.get(value, False)])
                lie, segment = np.array([lies[value]]), planned.segment > 0
                edge = model.edge(value, lie, op, [i], regathered, segment)
                seconds, held = seconds + edge.seconds[0, k], held + edge.bytes[0, k]
            brought.add(read)
        lies[op.name] = int(options.results[0, k])
    (loss,) = graph.outputs
    seconds += model.returning(loss, np.array([lies[loss]]))[0]
    return seconds, held + model.fixed_bytes()


def test_every_plan_costs_what_it_says(frontier):
    graph = residual_layers(7)
    assert len(frontier) > 2
    for plan in (*frontier, *frontier.baselines):
        seconds, held = priced_from_scratch(plan, graph)
        assert plan.step_seconds == pytest.approx(seconds, rel=1e-9)
        assert held < plan.peak_bytes


def test_the_parts_of_a_plan_sum_to_its_time(frontier):
    for plan in frontier:
        returned = plan.step_seconds - added_seconds(
            plan, MACHINE
        )  # bringing the loss to every device
        assert -1e-12 < returned < 1e-3  # and copies into buckets, which nothing hides


def test_no_plan_is_beaten_by_its_bound_or_by_a_baseline(frontier):
    for plan in frontier:
        assert 0 < plan.lower_bound_seconds <= plan.step_seconds
    for baseline in frontier.baselines:
        shown = frontier.settled(baseline)
        assert frontier.fastest(shown.peak_bytes).step_seconds <= shown.step_seconds
    assert frontier[0].lower_bound_seconds == pytest.approx(frontier[0].step_seconds, rel=1e-3)


def test_the_same_question_has_the_same_answer(frontier):
    again = search(residual_layers(7), MACHINE)
    assert [plan_to_json(plan) for plan in again] == [plan_to_json(plan) for plan in frontier]


def test_a_frontier_knows_its_costs_before_it_writes_plans(frontier):
    costs = frontier.costs
    assert [(plan.step_seconds, plan.peak_bytes) for plan in frontier] == list(costs)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(costs))
    assert frontier[1] is frontier.plans[1]


def test_the_memory_of_a_chosen_plan_is_settled_and_decides(frontier):
    for plan in (frontier.plans[0], frontier.plans[-1], *frontier.baselines):
        settled = frontier.settled(plan)
        assert settled.memory.peak == settled.peak_bytes
        assert settled.peak_bytes <= 1.1 * plan.peak_bytes  # without buckets in flight
        assert settled.memory.parameters > 0 and settled.memory.at
    least = frontier.smallest()
    assert least.peak_bytes <= frontier.settled(frontier.plans[-1]).peak_bytes
    assert frontier.fastest(least.peak_bytes).peak_bytes == least.peak_bytes
    with pytest.raises(InfeasibleError):
        frontier.fastest(least.peak_bytes - 1)
    middle = frontier.plans[len(frontier) // 2]
    settled = frontier.settled(middle)
    found = frontier.fastest(settled.peak_bytes)  # too little for what adds up
    assert found.peak_bytes <= settled.peak_bytes
    assert found.step_seconds <= settled.step_seconds
    assert plan_from_json(plan_to_json(found)) == found


@pytest.mark.parametrize("devices", [1, 3, 6, 7, 8])
def test_any_number_of_devices_has_plans(devices):
    machine = preset("8xH100").with_devices(devices)
    found = search(residual_layers(3), machine)
    assert all(plan.devices == devices for plan in found)
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        found.fastest(1)


def test_three_axes_are_searched_when_asked_for():
    mesh = Mesh.parse("dp=2 sp=2 tp=2")
    found = search(residual_layers(3), MACHINE, PlanOptions.of(meshes=[mesh]))
    two = search(residual_layers(3), MACHINE, PlanOptions.of(meshes=[Mesh.parse("dp=2 tp=4")]))
    assert found[0].mesh == mesh
    assert found[0].step_seconds < 2 * two[0].step_seconds


def test_neighbours_of_a_frontier_with_more_points_are_a_per_cent_apart():
    options = PlanOptions(points=200, whole=True, stages=(1,))
    memory = [peak for _, peak in search(residual_layers(8), preset("2xH100"), options).costs]
    gaps = sorted(more / less - 1 for more, less in pairwise(memory))
    assert len(memory) > 100
    assert gaps[len(gaps) * 3 // 4] < 0.01
    assert gaps[-1] < 0.06, "one of the eight layers is 4 per cent"


def test_an_exact_search_is_never_slower_than_the_fast_one():
    """Within equal sums: the memory of plans has maxima besides, which no search minimises."""
    mesh = Mesh.parse("dp=8")
    space, _ = SpaceFactory(residual_layers(2), recompute=True).space(MACHINE, mesh, "adamw", 1)
    exact = exact_frontier(space.folded.unfolded())
    fast = fast_frontier(space.folded, solver=space.solver, prices=space.prices)
    assert not exact.pinned
    for point in fast.points:
        best = min(p.time for p in exact.points if p.memory <= point.memory)
        assert best <= point.time * (1 + 1e-9)
        assert fast.lower_bound(point.memory) <= best * (1 + 1e-9)


def test_a_search_out_of_time_still_has_the_ends_and_the_baselines():
    found = search(residual_layers(5), MACHINE, PlanOptions.of(seconds=0))
    assert len(found) >= 1 and len(found.baselines) > 1
    for baseline in found.baselines:
        assert found.fastest(baseline.peak_bytes).peak_bytes <= baseline.peak_bytes


def test_progress_tells_the_mesh_and_the_best_so_far():
    told = []
    search(residual_layers(2), MACHINE, progress=lambda text, part: told.append((text, part)))
    assert (
        told[0] == ("uniform strategies", 0.0)
        and told[1][0].startswith("mesh 8")
        and told[-1] == ("done", 1.0)
    )
    assert all("best so far" in text for text, _ in told[1:-1])


def test_a_strategy_in_stages_lowers_the_bound_from_its_own_bytes_on():
    loop = MeshLoop(SpaceFactory(residual_layers(1), recompute=False), MACHINE)
    staged = Candidate(
        Point(2.0, 0, ()), 1000, None, "two stages", (), staged=SimpleNamespace(schedule="1F1B")
    )
    given = SimpleNamespace(
        pipelines=lambda *_: [staged], rescheduled=lambda *_: [], around=lambda _: []
    )
    _add_pipelines(loop, given, ((1,), (2,)), 3.0, math.inf, lambda *_: None)
    assert loop.pipelines == [staged]
    assert (loop.bound(999), loop.bound(1000)) == (math.inf, 2.0)


def test_a_mesh_that_a_constraint_rules_out_leaves_the_others():
    meshes = [Mesh.parse("dp=8"), Mesh.parse("dp=2 tp=4")]
    pinned = parse_constraints(["pin *=tp:batch"])
    found = search(residual_layers(2), MACHINE, PlanOptions.of(meshes=meshes, constraints=pinned))
    assert {str(plan.mesh) for plan in found} == {"dp=2 tp=4"}
