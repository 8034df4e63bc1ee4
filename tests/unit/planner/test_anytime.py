"""A search that runs out of time, and what it tells while it runs."""

import re
from itertools import pairwise

import pytest

from shardwright.api import search_with as search
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.machine.presets import preset
from shardwright.planner import deadline, planner
from shardwright.planner.meshes import mesh_turns
from tests.harness.layered_graphs import residual_layers
from tests.harness.plans import fastest_by_sums

MACHINE = preset("8xH100")
GRAPH = residual_layers(3)
MESHES = [Mesh.parse("dp=2 tp=4"), Mesh.parse("dp=8")]


@pytest.fixture(scope="module")
def whole():
    return search(GRAPH, MACHINE, PlanOptions.of(meshes=MESHES))


@pytest.fixture(scope="module")
def hurried():
    return search(GRAPH, MACHINE, PlanOptions.of(meshes=MESHES, seconds=0))


def test_without_time_both_ends_are_those_of_the_whole_frontier(whole, hurried):
    assert len(hurried) < len(whole)
    assert hurried.costs[0] == whole.costs[0]
    # The least sum is found without time. What recomputed layers hold is a maximum besides: under
    # it others may keep operators, as small and faster.
    (seconds, peak), (least_seconds, least_peak) = hurried.costs[-1], whole.costs[-1]
    assert least_peak <= peak <= 1.01 * least_peak
    assert least_seconds <= seconds <= 1.02 * least_seconds


def test_without_time_bounds_hold_and_are_no_tighter(whole, hurried):
    for plan in hurried:
        best = fastest_by_sums(whole, plan.peak_bytes)
        assert 0 < plan.lower_bound_seconds <= best.step_seconds <= plan.step_seconds
    loose = [plan.step_seconds / plan.lower_bound_seconds for plan in hurried]
    assert max(loose) > max(p.step_seconds / p.lower_bound_seconds for p in whole)


def test_time_that_runs_out_between_two_meshes_is_spent_on_the_first(whole, monkeypatch):
    now = [0.0]

    class Clock:
        @staticmethod
        def perf_counter():
            return now[0]

    for module in (planner, mesh_turns, deadline):
        monkeypatch.setattr(module, "time", Clock)

    def progress(text, part):
        if text.startswith(f"mesh {MESHES[1]}"):
            now[0] = 100.0  # the first mesh took as long

    found = search(GRAPH, MACHINE, PlanOptions.of(meshes=MESHES, seconds=50), progress=progress)
    assert found.search_seconds == 100.0
    fewer = [sum(plan.mesh == mesh for plan in found) for mesh in MESHES]
    alone = search(GRAPH, MACHINE, PlanOptions.of(meshes=MESHES[:1]))
    assert fewer[0] > 2 and fewer[1] <= 2 + len(found.baselines)
    assert {plan.step_seconds for plan in found if plan.mesh == MESHES[0]} <= {
        plan.step_seconds for plan in (*alone, *alone.baselines)
    }


def test_progress_rises_and_the_best_so_far_falls():
    told = []
    found = search(GRAPH, MACHINE, progress=lambda text, part: told.append((text, part)))
    parts = [part for _, part in told]
    assert parts[0] == 0 and parts[-1] == 1
    assert all(a < b for a, b in pairwise(parts))
    shapes = [re.match("mesh ([0-9x]+)", text)[1] for text, _ in told[1:-1]]
    assert shapes == ["8", "2x4", "4x2"]
    best = [float(re.search(r"best so far ([0-9.]+) ms", text)[1]) for text, _ in told[1:-1]]
    assert all(a >= b for a, b in pairwise(best))
    assert best[-1] >= round(found[0].step_seconds * 1e3, 1)
