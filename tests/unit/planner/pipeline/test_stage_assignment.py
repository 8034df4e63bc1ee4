"""Pipelines in the search: cuts against enumeration, prices from scratch, bounds that hold."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.api import search_with as search
from shardwright.ir.graph import LeafKind
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.meshes.mesh_loop import MeshLoop
from shardwright.planner.pipeline import cuts as stage_cuts
from shardwright.planner.pipeline import stage_assignment as pipelines
from shardwright.planner.pipeline.cuts import StageCuts
from shardwright.planner.pipeline.partition import Intervals, objective, partition
from shardwright.planner.pipeline.stage_assignment import Pipelines
from shardwright.planner.pipeline.stage_costs import Offer, StageCosts, most_updates
from shardwright.planner.space_factory import SpaceFactory
from shardwright.program.lower.stages import split, splits_backward
from shardwright.report.text.explain import explain
from shardwright.simulate.time.pipeline_schedules import waiting
from shardwright.simulate.time.pipelines import (
    StageTime,
    least_of_slowest,
    least_step_seconds,
    step_seconds,
    steps_seconds,
)
from shardwright.tracing.capture import capture_call
from tests.harness import models


class Chain(nn.Module):
    """Layers of different widths: the first is by far the largest; the first weight comes again."""

    def __init__(self, widths=(8, 64, 8, 8, 16, 8)):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return (x @ self.layers[0].weight.t()).square().sum()


@pytest.fixture(scope="module")
def graph():
    return capture_call(Chain(), (torch.ones(32, 8),)).graph


@pytest.fixture(scope="module")
def one_group(graph):
    """What is found on one group of two devices, for a batch in four pieces."""
    machine = preset("4xcpu")
    rounds = MeshLoop(SpaceFactory(graph, recompute=True), machine)
    (mesh,) = (search(graph, machine.with_devices(2))[0].mesh,)
    offer = rounds._group(mesh, 4, float("inf")).offer
    return offer.writer, [offer.writer.space.prices.point(choice) for choice in offer.points]


tables = st.integers(1, 3).flatmap(
    lambda stages: st.integers(stages + 1, 6).flatmap(
        lambda places: st.lists(
            st.integers(1, 9) | st.just(10**9),
            min_size=stages * places * places,
            max_size=stages * places * places,
        ).map(lambda found: np.array(found, float).reshape(stages, places, places))
    )
)


@given(tables, st.integers(1, 4))
@settings(max_examples=60)
def test_partitions_are_those_that_enumeration_finds(costs, micro_batches):
    costs = np.where(costs == 10**9, np.inf, costs)
    stages, places, _ = costs.shape
    best = np.inf
    for cuts in itertools.combinations(range(1, places - 1), stages - 1):
        ends = (0, *cuts, places - 1)
        taken = [costs[s, ends[s], ends[s + 1]] for s in range(stages)]
        if np.isfinite(taken).all():
            best = min(best, objective(taken, micro_batches))
    intervals = Intervals.of(np.isfinite(costs).any(axis=0))
    listed = costs[:, intervals.begin, intervals.end]
    found = partition(listed, intervals, micro_batches)
    if found is None:
        assert best == np.inf
        return
    assert [0, *intervals.end[found]] == [*intervals.begin[found], places - 1]
    taken = [float(listed[s, i]) for s, i in enumerate(found)]
    assert objective(taken, micro_batches) == pytest.approx(best)


@pytest.mark.parametrize("micro_batches, cut", [(1, 2), (2, 1)])
def test_the_slowest_stage_counts_less_the_fewer_micro_batches_there_are(micro_batches, cut):
    """A slower stage by which the sum is only a little less is tried, and taken where it pays."""
    costs = np.full((2, 4, 4), np.inf)
    costs[0, 0, 1], costs[1, 1, 3] = 5.0, 5.0
    costs[0, 0, 2], costs[1, 2, 3] = 3.0, 6.6
    intervals = Intervals.of(np.isfinite(costs).any(axis=0))
    found = partition(costs[:, intervals.begin, intervals.end], intervals, micro_batches)
    assert intervals.end[found].tolist() == [cut, 3]


@given(st.integers(1, 5), st.integers(1, 6), st.sampled_from(["1F1B", "GPipe"]))
@settings(max_examples=30)
def test_equal_stages_take_one_after_the_other_and_all_micro_batches(stages, pieces, schedule):
    times = [StageTime(3.0, 0.5)] * stages
    assert step_seconds(schedule, times, pieces) == pytest.approx((pieces + stages - 1) * 3 + 0.5)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=5), st.integers(1, 6))
@settings(max_examples=30)
def test_a_step_is_as_long_as_its_slowest_stage_and_one_of_each_other(times, pieces):
    stages = [StageTime(time) for time in times]
    least = objective([time * pieces for time in times], pieces)
    found = step_seconds("GPipe", stages, pieces)
    assert found == pytest.approx(least)
    # Stages that take turns need not wait for the slowest one's forward passes.
    assert step_seconds("1F1B", stages, pieces) >= max(sum(times), pieces * max(times)) - 1e-9


@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
    st.integers(1, 6),
    st.sampled_from(["1F1B", "GPipe", "async stale"]),
)
@settings(max_examples=60)
def test_no_pipeline_beats_the_bound_that_one_group_gives(times, once, pieces, schedule):
    stages = [StageTime(time, done) for time, done in zip(times, once, strict=False)]
    if schedule.startswith("async"):
        pieces = 1
    updates = sum(stage.once for stage in stages)
    alone = pieces * sum(times) + updates
    for most in (updates, 2 * updates):  # what is known of the updates is a bound
        least = least_step_seconds(schedule, alone, most, len(stages), pieces)
        assert step_seconds(schedule, stages, pieces) >= least * (1 - 1e-12)
    if schedule == "1F1B":
        least = least_of_slowest(len(stages), pieces, alone - updates, pieces * max(times))
        assert step_seconds(schedule, stages, pieces) >= least * (1 - 1e-12)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=12, max_size=12),
    st.sampled_from([(one.name, each) for one in SCHEDULES.values() for each in one.tried]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_pipeline_of_other_schedules_beats_it_either(times, other, groups, rounds, split):
    schedule, each = other
    pieces = rounds * groups
    stages = [StageTime(time, 0.25, splits=split) for time in times[: groups * each]]
    once = sum(stage.once for stage in stages)
    alone = pieces * sum(stage.micro_batch for stage in stages) + once
    least = least_step_seconds(schedule, alone, once, groups, pieces)
    assert step_seconds(schedule, stages, pieces, groups) >= least * (1 - 1e-12)


def test_the_bound_is_near_what_even_stages_take():
    for pieces, stages in ((4, 4), (16, 4), (64, 64)):
        even = step_seconds("1F1B", [StageTime(1.0)] * stages, pieces)
        bound = least_step_seconds("1F1B", float(pieces * stages), 0.0, stages, pieces)
        assert 0.91 * even < bound < even
    # Two stages, four micro-batches of S = 2 s, f = 1/3, b = 2/3: the first stage has two forward
    # passes ahead, so c = 3 b + 2 f = 8/3; the second one, c = 3. T = S + S / (3/8 + 1/3).
    bound = least_step_seconds("1F1B", 8.0, 0.0, 2, 4)
    assert bound == pytest.approx(2 + 2 * 24 / 17, rel=1e-12)
    even = step_seconds("GPipe", [StageTime(1.0)] * 4, 3)
    assert least_step_seconds("GPipe", 12.0, 0.0, 4, 3) == pytest.approx(even)
    assert least_step_seconds("1F1B", 8.0, 0.0, 4, 1) == 8.0
    assert least_step_seconds("1F1B", float("inf"), 1.0, 4, 2) == float("inf")


def test_the_first_stage_keeps_the_most():
    assert [held.max() for held in waiting("1F1B", 4, 4, 3)] == [3, 3, 2, 1]
    assert [held.max() for held in waiting("GPipe", 4, 4, 6)] == [6, 6, 6, 6]


def test_costs_of_stages_add_up_to_those_of_one_group(graph, one_group):
    writer, points = one_group
    pipelines = Pipelines(Offer(writer, points), StageCuts(graph), 2, "1F1B")
    choices = np.array([p.choice for p in points], np.int64)
    ends = np.array([0, 3, 5, len(graph.ops)])
    running = pipelines.offer.running_of(choices)
    costs = StageCosts(running, StageCuts(graph), ends, pipelines.link)
    tied = choices.shape[0] * [0]
    for k, point in enumerate(points):
        spans = [(0, 1), (1, 2), (2, 3)]
        seconds = sum(costs.seconds()[k, a, b] for a, b in spans)
        seconds -= costs.crossing_seconds[k].sum() * writer.space.model.micro_batches
        assert seconds == pytest.approx(point.time)
        buffers = 2 * writer.space.model.micro_batches * 2 * costs.crossing[k].sum()
        held = sum(int(costs.bytes(1)[k, a, b]) for a, b in spans) - int(buffers)
        # The first weight is on two stages.
        weight = writer.plan(point, 0, 0.0, "", ()).parameters[0]
        tied[k] = held - point.memory
        assert tied[k] == weight.bytes
    assert costs.crossing[:, 0].sum() == costs.crossing[:, -1].sum() == 0
    assert (costs.crossing[:, 1:-1] > 0).all()


def test_no_pair_of_cuts_and_points_is_faster_than_what_is_found(graph, one_group):
    """Enumeration over all cuts and the points of both stages, each priced from scratch."""
    writer, points = one_group
    pipelines = Pipelines(Offer(writer, points), StageCuts(graph), 2, "1F1B")
    fastest = min(one.point.time for one in pipelines.staged())
    best = np.inf
    for cut in pipelines.positions[1:-1].tolist():
        for one, other in itertools.product(range(len(pipelines.points)), repeat=2):
            stage = (pipelines.offer.owners.choice >= cut).astype(int)
            rows = np.array([one, other])[stage]
            mixed = pipelines.points[rows, np.arange(len(stage))]
            found = pipelines.priced(tuple(mixed.tolist()), [cut])
            if found is not None:
                best = min(best, found.point.time)
    assert fastest <= best * 1.1, (fastest, best)
    assert best >= min(p.time for p in points) / 2, "the mean of the stages is a bound"


@pytest.mark.parametrize("schedule, each", [("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_groups_of_two_stages_are_near_the_best_of_all_cuts(graph, one_group, schedule, each):
    """Enumeration over many cuts under the fastest point; memory is that of the worst group."""
    writer, points = one_group
    pipelines = Pipelines(Offer(writer, points), StageCuts(graph), 2, schedule, each)
    staged = pipelines.staged()
    fastest = min(staged, key=lambda one: one.point.time)
    best = np.inf
    quick = min(points, key=lambda point: point.time)
    for cuts in itertools.combinations(pipelines.positions[1:-1:2].tolist(), 3):
        found = pipelines.priced(quick.choice, cuts)
        best = min(best, found.point.time if found else np.inf)
    assert fastest.point.time <= best * 1.1
    assert len(fastest.receive_seconds) == len(fastest.cuts) == 3
    # In a V the group at its end hands values to itself.
    assert [way > 0 for way in fastest.receive_seconds] == [True, schedule != "ZBVZeroBubble", True]
    memory = [one.point.memory for one in staged]
    assert min(memory) < max(memory)


def test_with_one_micro_batch_the_bound_is_the_work_of_one_group(graph):
    """Its groups take turns, with the memory of all, and update their weights side by side."""
    loop, mesh = MeshLoop(SpaceFactory(graph, recompute=True), preset("4xcpu")), Mesh.parse("dp=2")
    loop.pipe(mesh, 2, 1, float("inf"), compare=False)
    group, bound = loop._group(mesh, 1, float("inf")), loop.bounds[-1].seconds
    assert loop.found
    for one in loop.found:
        work = group.alone(2 * one.peak) - group.most_updates
        assert bound(one.peak) == pytest.approx(work)
        assert one.point.time >= work


def test_no_update_takes_longer_than_each_parameter_in_its_slowest_layout(graph):
    loop = MeshLoop(SpaceFactory(graph, recompute=True), preset("4xcpu"))
    writer = loop.writer(loop.factory, Mesh.parse("dp=2"), 2, staged=True)
    model = writer.space.model
    slowest = [
        model.parameter(leaf, model.storable(leaf)).seconds.max()
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    ]
    assert most_updates(writer) == pytest.approx(sum(slowest)) and min(slowest) > 0


def test_pipelines_are_on_the_frontier_and_read_back(graph):
    frontier = search(graph, preset("4xcpu"), PlanOptions.of(stages=(1, 2, 4)))
    assert {plan.stages for plan in frontier} >= {1, 2}
    even = {plan.name: plan for plan in frontier.baselines}["even pipeline"]
    assert even.pipeline is not None
    for plan in (*frontier, even):
        assert plan_from_json(plan_to_json(plan)) == plan
        assert plan.lower_bound_seconds <= plan.step_seconds
        if plan.stages > 1:
            assert plan.mesh.size == 4
            assert f"{plan.stages} stages on" in explain(plan)
            plan.pipeline.check(plan.micro_batches)
    peaks = [plan.peak_bytes for plan in frontier]
    assert peaks == sorted(peaks, reverse=True)


def test_every_device_of_the_outer_axis_has_a_sample_of_a_first_try(graph):
    told = []
    machine = preset("8xcpu")
    found = search(
        graph, machine, PlanOptions.of(stages=None), progress=lambda what, done: told.append(what)
    )
    first_schedule = r"(\d+) stages on (.*), (\d+) micro-batches(?:, best so far .*)?$"
    tried = [re.match(first_schedule, what) for what in told]
    tries = [(int(t[1]), Mesh.parse(t[2]), int(t[3])) for t in tried if t]
    assert {groups for groups, _, _ in tries} == {2, 4}  # the model has parameters for five stages
    assert len(set(tries)) == len(tries), "nothing is searched twice"
    first = {}
    for groups, mesh, count in tries:
        first.setdefault((groups, mesh), count)
    for (groups, mesh), count in first.items():
        assert count == max(groups, min(4 * groups, 32 // mesh.shape[0])), (groups, mesh)
    assert any(plan.stages > 1 for plan in found)


def test_without_time_only_what_must_be_is_searched(graph):
    machine = preset("4xcpu")
    plain = search(graph, machine, PlanOptions.of(seconds=0))
    hurried = search(graph, machine, PlanOptions.of(stages=None, seconds=0))
    assert [plan_to_json(p) for p in hurried] == [plan_to_json(p) for p in plain]
    told = []
    piped = search(
        graph, machine, PlanOptions.of(stages=(2,), seconds=0), progress=lambda w, _: told.append(w)
    )
    assert {plan.stages for plan in piped} == {2}
    assert sum("micro-batches" in what for what in told) == 1


def test_climbing_is_as_good_as_searching_every_number_of_stages(graph):
    machine = preset("8xcpu")
    climbed = search(graph, machine, PlanOptions.of(stages=None))
    every = search(graph, machine, PlanOptions.of(stages=(1, 2, 4)))
    assert climbed[0].step_seconds <= every[0].step_seconds * (1 + 1e-9)
    assert {plan.name for plan in every.baselines} <= {plan.name for plan in climbed.baselines}
    assert [plan_to_json(p) for p in search(graph, machine, PlanOptions.of(stages=None))] == [
        plan_to_json(plan) for plan in climbed
    ]


def test_pipelines_side_by_side_take_what_each_takes_alone():
    pipelines = [[StageTime(t, 0.25 * t, 0.125, t > 1) for t in (1.0, 2.0, 0.5, d)] for d in (1, 4)]
    for schedule, groups in (("1F1B", 4), ("GPipe", 4), ("ZBVZeroBubble", 2), ("async stale", 4)):
        together = steps_seconds(schedule, pipelines, 4, groups)
        assert together == [step_seconds(schedule, one, 4, groups) for one in pipelines]
        assert together[0] < together[1]
    assert steps_seconds("1F1B", [], 4) == []


def test_longer_stages_are_let_in_where_short_ones_do_not_fit(graph, one_group, monkeypatch):
    """Leaving out what takes longer than a whole pipeline changes nothing."""
    offer = Offer(*one_group)
    found = Pipelines(offer, StageCuts(graph), 2, "1F1B").staged()
    monkeypatch.setattr(pipelines, "_SLOWER", (1e9,))
    assert {(s.point.time, s.point.memory) for s in found} == {
        (s.point.time, s.point.memory)
        for s in Pipelines(offer, StageCuts(graph), 2, "1F1B").staged()
    }


def test_halves_of_backward_passes_are_read_off_the_whole_graph(graph):
    cuts = StageCuts(graph)
    ends = [0, 3, 5, len(graph.ops)]
    stages = split(graph, ends[1:-1], copies=True)
    told = [cuts.splits(begin, end) for begin, end in itertools.pairwise(ends)]
    assert told == [splits_backward(stage) for stage in stages]
    assert set(told) == {False, True}


def test_batch_norm_leaves_one_micro_batch():
    model, batch = models.cnn(norm=True)
    frontier = search(
        capture_call(model, (), batch).graph, preset("2xcpu"), PlanOptions.of(stages=(2,))
    )
    assert {p.micro_batches for p in frontier} == {1}
    assert {p.mesh.shape[0] for p in frontier} == {2}
    assert not {p.schedule for p in frontier} & {"1F1B", "Interleaved1F1B"}  # which gain nothing


def test_stages_that_cannot_be_are_refused(graph):
    with pytest.raises(PipelineError, match="3 stages cannot share the 4 devices of 4xcpu evenly"):
        search(graph, preset("4xcpu"), PlanOptions.of(stages=(3,)))
    layers = len(graph.leaves_of(LeafKind.PARAMETER))
    with pytest.raises(PipelineError, match="no pipeline of 64 stages through this model"):
        search(graph, preset("8x8xH100"), PlanOptions.of(stages=(64,)))
    assert layers < 64


class Deep(nn.Module):
    """Residual layers of two halves, between all of which a stage may begin."""

    def __init__(self, layers):
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(4, 4) for _ in range(2 * layers))

    def forward(self, x):
        for half in self.halves:
            x = x + half(x)
        return x.sum()


def test_many_equal_layers_can_be_equal_stages(monkeypatch):
    deep = capture_call(Deep(126), (torch.zeros(2, 4),)).graph  # a layer has four operators
    for groups in (2, 64):
        assert set(range(4, 504, 4)) < set(StageCuts(deep).positions(groups).tolist())
    monkeypatch.setattr(stage_cuts, "_MOST_POSITIONS", 200)
    found = StageCuts(deep).positions(2)
    assert len(found) <= 200
    assert set(np.diff(found[2:-2])) == {4}


def test_asynchronous_plans_are_proposed_only_when_allowed(graph):
    machine = preset("2xcpu")
    frontier = search(graph, machine, PlanOptions.of(stages=(2,)))
    assert not any(plan.schedule.startswith("async") for plan in frontier)
    allowed = search(graph, machine, PlanOptions.of(stages=(2,), allow_async=True))
    asked = [plan for plan in allowed if plan.schedule == "async spectrain"]
    assert asked
    for plan in asked:
        assert plan.stages == plan.mesh.size == 2
        assert plan.micro_batches == 1
        assert plan.lower_bound_seconds <= plan.step_seconds
        assert plan_from_json(plan_to_json(plan)) == plan
        text = " ".join(explain(plan).split())
        assert "this does not train as one device does, see docs/how-to/async.md" in text
        with pytest.raises(PipelineError, match="takes the batch as a whole"):
            plan.pipeline.check(2)
    shared = search(graph, preset("4xcpu"), PlanOptions.of(stages=(2,), allow_async=True))
    assert any(p.stages == 2 and p.mesh.size == 4 for p in shared if p.pipeline.weights)
    assert not any("asynchronous" in note for p in allowed if p not in asked for note in p.notes)


def test_allowing_asynchronous_plans_is_enough_to_search_for_them(graph):
    machine = preset("2xcpu")
    by_default = [
        plan_to_json(plan) for plan in search(graph, machine, PlanOptions.of(allow_async=True))
    ]
    assert by_default == [
        plan_to_json(plan)
        for plan in search(graph, machine, PlanOptions.of(stages=(1, 2), allow_async=True))
    ]
    assert by_default != [plan_to_json(plan) for plan in search(graph, machine)]


def test_an_endless_pipeline_is_as_slow_as_its_slowest_stage():
    stages = [StageTime(2.0, 0.5), StageTime(3.0, 0.25, 0.125)]
    assert step_seconds("async stale", stages, 1) == 3.5
    assert [held.max() for held in waiting("async stale", 3, 3, 3)] == [3, 2, 1]
