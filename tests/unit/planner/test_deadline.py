"""After its time limit a search ends, and only the plan that is chosen is simulated."""

import math
import time
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.api import search_with
from shardwright.ir.frontier import InfeasibleError
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner import planner
from shardwright.planner.deadline import NEVER, Deadline, half_way
from shardwright.planner.plans.searched_frontier import SearchedFrontier
from shardwright.planner.slow_networks import with_slow_networks
from shardwright.planner.strategies.preference import preferred
from shardwright.report.other_plans import other_plans
from shardwright.tracing.op_memory.footprints import Footprints
from tests.harness.layered_graphs import residual_layers
from tests.harness.plan_simulations import FunctionSimulation
from tests.harness.plans import simple

OVER = Deadline(0.0, 0.0)


def test_plans_are_searched_in_a_part_of_the_time_and_compared_in_the_rest():
    now = time.perf_counter()
    found = Deadline.after(100.0)
    assert now < found.tables < found.end and 100.0 <= found.end - now < 101.0
    assert not found.is_over and OVER.is_over
    assert not NEVER.is_over and Deadline.after(math.inf) == NEVER
    assert Deadline.after(0.0).is_over


def test_the_time_half_way_to_an_end():
    now = time.perf_counter()
    assert 50.0 <= half_way(now + 100.0) - now < 51.0
    assert half_way(math.inf) == math.inf and half_way(now - 100.0) >= now


def test_without_time_meshes_are_searched_until_a_plan_fits():
    told = []
    graph, machine = residual_layers(3), preset("8xH100")
    search_with(graph, machine, PlanOptions.of(seconds=0), progress=lambda w, _: told.append(w))
    assert [one for one in told if "mesh" in one] == ["mesh 8"]
    one = search_with(graph, machine, PlanOptions.of(seconds=0))
    assert one.is_late and one.ended_early
    assert not search_with(graph, machine, PlanOptions()).ended_early
    limit = one[-1].peak_bytes // 2
    told.clear()
    tight = PlanOptions.of(seconds=0, memory_limit=limit, micro_batches=(1,))
    search_with(graph, machine, tight, progress=lambda what, _: told.append(what))
    assert sum("mesh" in one for one in told) > 1, "none of the first mesh fits by its table"


def listed(deadline):
    """A frontier of which the fastest plan is too large, and the names that were simulated."""
    costs = {"fast": (1.0, 120), "good": (1.1, 90), "slow": (1.2, 60), "base": (1.0, 80)}
    made = {
        name: replace(simple(), name=name, step_seconds=time, peak_bytes=peak, memory=None)
        for name, (time, peak) in costs.items()
    }
    seen = []

    def compare(plan):
        seen.append(plan.name)
        return plan

    found = SearchedFrontier(
        tuple(made[name] for name in ("fast", "good", "slow")),
        baselines=(made["base"],),
        simulation=FunctionSimulation(compare),
        deadline=deadline,
        device_bytes=100,
    )
    return found, seen


def test_without_time_only_the_plan_that_fits_by_its_table_is_simulated():
    found, seen = listed(OVER)
    chosen = preferred(found)
    assert chosen.plan.name == "good" and chosen.uniform is None
    assert chosen.plan.notes[-1].startswith("the time limit has ended the search")
    assert set(seen) == {"good"}
    assert other_plans(chosen.plan, found, 100).simulated == {}
    in_time, seen = listed(NEVER)
    assert in_time.fastest(100).name == "base" and "base" in seen


def test_without_time_the_smallest_plan_is_simulated_where_none_fits_by_its_table():
    found, seen = listed(OVER)
    with pytest.raises(InfeasibleError):
        found.fastest(50)
    assert seen[0] == "slow"


def test_a_frontier_of_the_interface_is_compared_whenever_it_is_asked():
    """Its user may ask long after the search."""
    found = sw.search(residual_layers(3), preset("8xH100"), seconds=0)
    assert not found.is_late and found.ended_early
    assert any("time limit" in note for note in found.fastest().notes)
    assert any("time limit" in note for note in found.smallest().notes)
    with pytest.raises(InfeasibleError, match="the time limit has ended the search"):
        found.fastest("2MiB")
    hurried, _ = listed(OVER)
    assert hurried.fastest(100).name == "good"
    assert hurried.without_deadline().fastest(100).name == "base"
    kept = listed(NEVER)[0]
    assert kept.fastest(100) is kept.without_deadline().fastest(100)


def test_a_search_that_was_cut_says_so_though_time_is_left():
    """The searches of meshes end before the comparison of plans does."""
    graph, machine = residual_layers(3), preset("8xH100")
    now = time.perf_counter()
    cut = planner.search(graph, machine, PlanOptions(), Footprints(), None, Deadline(now, math.inf))
    assert cut.is_cut and cut.ended_early and not cut.is_late
    assert not planner.search(graph, machine, PlanOptions(), Footprints()).is_cut
    assert len(cut) < len(planner.search(graph, machine, PlanOptions(), Footprints()))


def test_a_form_in_which_a_strategy_fits_has_all_the_time(monkeypatch):
    ends = []
    search_meshes = planner.search_meshes

    def noted(loop, meshes, counts, end, notify, **how):
        ends.append((loop.best_start, end))
        search_meshes(loop, meshes, counts, end, notify, **how)

    monkeypatch.setattr(planner, "search_meshes", noted)
    graph, machine = residual_layers(3), preset("8xH100")
    search_with(graph, machine, PlanOptions.of(seconds=1000))
    start = time.perf_counter()
    ((best, end),) = ends
    assert math.isfinite(best) and 500 < end - start < 600
    ends.clear()
    search_with(graph, machine, PlanOptions.of(seconds=1000, memory_limit=2**21))
    assert math.isinf(ends[0][0]) and 250 < ends[0][1] - time.perf_counter() < 300


def test_without_time_a_frontier_has_its_ends():
    found, seen = listed(OVER)
    assert [plan.name for plan in found.all_settled()] == ["fast", "slow"]
    assert "good" not in seen and found.all_settled().baselines == ()
    in_time, _ = listed(Deadline.after(600.0))
    settled = in_time.all_settled()
    assert [plan.name for plan in settled] == ["fast", "good", "slow"]
    assert [plan.name for plan in settled.baselines] == ["base"]


def test_without_time_there_is_no_second_search():
    machine = replace(preset("2x8xH100"), name="slow")
    times = []

    def search(_machine, _known):
        times.append(1)
        plan = replace(simple(), step_seconds=10.0, lower_bound_seconds=1.0, memory=None)
        return SearchedFrontier((plan,), device_bytes=2 * plan.peak_bytes)

    assert machine.most_overlap
    with_slow_networks(search, machine, None, OVER)
    assert len(times) == 1
    with_slow_networks(search, machine, None)
    assert len(times) == 3
