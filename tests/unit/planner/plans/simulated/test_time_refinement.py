"""Plans that are shown take what the simulation of their program says."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.model import Measured
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.plans.simulated.time_refinement import TimeRefinement
from shardwright.planner.recost import recosted
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.lower.plan_lowering import PlanLowering
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.rules.analysis import analyze
from shardwright.simulate.time.program_prices import prices_of
from shardwright.simulate.time.step_program import simulated
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(3)
MESHES = [Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2")]
MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())
MACHINE = replace(preset("4xH100"), overlap=0.6, arrival_skew_seconds=20e-6, measured=MEASURED)


def frontier(count, machine=MACHINE):
    return search(GRAPH, machine, PlanOptions.of(meshes=MESHES, micro_batches=(count,)))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_plans_that_are_shown_take_the_time_of_their_whole_program(count):
    found = frontier(count)
    for plan in (found[0], *found.baselines):
        assert (plan.timeline is None) == (count > 1)  # whole batches are ranked by theirs
        shown = found.settled(plan)
        assert found.settled(plan) is shown
        program = step_program(GRAPH, analyze(GRAPH), read_plan(plan, GRAPH, analyze(GRAPH)), 0)
        whole = simulated(program, prices_of(plan, GRAPH, MACHINE), plan.devices)
        # The results of all micro-batches are copied into one buffer, here of at most three.
        assert shown.step_seconds == pytest.approx(whole.seconds, rel=2e-3)
        assert shown.step_seconds == shown.timeline.seconds
        assert 0 < shown.lower_bound_seconds <= shown.step_seconds
        assert shown.memory is not None
        assert plan_from_json(plan_to_json(shown)) == shown


def test_more_overlap_is_never_slower_and_more_skew_never_faster():
    plan = next(p for p in frontier(3).baselines if p.name == "fully sharded")
    analysis = analyze(GRAPH)
    lowering = PlanLowering(GRAPH, analysis, read_plan(plan, GRAPH, analysis), None)

    def seconds(**figures):
        refinement = TimeRefinement(GRAPH, replace(MACHINE, **figures))
        return refinement.refined(plan, lowering).step_seconds

    hidden = [seconds(overlap=part) for part in (0.0, 0.5, 1.0)]
    assert hidden == sorted(hidden, reverse=True) and hidden[2] < 0.95 * hidden[0]
    late = [seconds(arrival_skew_seconds=skew) for skew in (0.0, 1e-4, 1e-3)]
    assert late == sorted(late) and late[2] > 1.05 * late[0]


def test_plans_of_presets_are_ranked_by_tables_and_simulated_when_shown():
    found = frontier(1, replace(preset("4xH100"), overlap=0.0))
    assert found[0].timeline is None
    assert found[0].step_seconds == pytest.approx(found[0].added_seconds)
    assert found.settled(found[0]).timeline is not None
    assert frontier(1, preset("4xH100"))[0].timeline is None


def test_a_plan_without_a_timeline_gets_one_when_it_is_costed_again():
    found = frontier(3)
    shown = found.settled(found[0])
    bare = replace(shown, timeline=None, memory=None)
    again = recosted(bare, GRAPH, MACHINE, "adamw", found)
    assert again.timeline == shown.timeline


def test_the_refined_frontier_is_sorted_by_simulated_times():
    shown = frontier(3).all_settled()
    assert all(plan.timeline is not None for plan in (*shown, *shown.baselines))
    times = [plan.step_seconds for plan in shown]
    assert times == sorted(times)


def test_a_plan_is_no_rival_of_itself():
    found = frontier(3)
    shown = found.with_rivals(found.settled(found[0]))
    listed = [rival for rival in shown.rivals if not rival.name]
    assert [(r.step_seconds, r.peak_bytes) for r in listed] == list(found.costs[1:])
