"""Pipelines on a timeline: as long as the sweep over passes says, which knows no tasks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.timeline import Stream
from shardwright.simulate.time.pipeline_step import mini_batches, pipeline_timeline, works_of
from shardwright.simulate.time.pipelines import StageTime, step_seconds
from tests.harness.plans import MS, moved, op, parameter, simple


def pipeline(schedule, seconds, pieces=1, way=0.0, once=0.0):
    """A stage of one operator for each of `seconds`, a third of them forward; all in ms."""
    names = [f"layer{i}" for i in range(len(seconds))]
    inner = Mesh.parse("dp=1")
    return replace(
        simple(),
        mesh=Mesh.parse(f"pp={len(seconds)}"),
        stages=len(seconds),
        schedule=schedule,
        cuts=tuple(names[1:]),
        receive_seconds=(way * MS,) * (len(seconds) - 1),
        micro_batches=pieces,
        ops=tuple(
            replace(
                op(name, "linear", name, 1, "m", "dp:R", ms * pieces, mesh=inner),
                backward_seconds=2 / 3 * ms * pieces * MS,
                reads=(f"{name}.weight",),
            )
            for name, ms in zip(names, seconds, strict=True)
        ),
        parameters=tuple(parameter(f"{n}.weight", "dp:R", ms=once, mesh=inner) for n in names),
        transfers=(),
    )


def times(seconds, way=0.0, once=0.0):
    ways = [0.0] + [way] * (len(seconds) - 1)
    return [StageTime(s, once, w) for s, w in zip(seconds, ways, strict=True)]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("seconds", [(3.0, 3.0), (3.0, 6.0), (6.0, 3.0, 4.5), (3.0,) * 4])
@pytest.mark.parametrize("pieces", [4, 8])
def test_a_step_is_as_long_as_its_passes_say(schedule, seconds, pieces):
    plan = pipeline(schedule, seconds, pieces, once=2.0)
    expected = step_seconds(schedule, times(seconds, once=2.0), pieces)
    assert pipeline_timeline(plan).seconds / MS == pytest.approx(expected)


def test_what_is_received_is_waited_for_and_shown_on_its_own_track():
    plan = pipeline("1F1B", (3.0, 3.0), 4, way=0.5)
    found = pipeline_timeline(plan)
    expected = step_seconds("1F1B", times((3.0, 3.0), way=0.5), 4)
    assert found.seconds / MS == pytest.approx(expected)
    received = [task for task in found.tasks if task.track.stream is Stream.COMMUNICATION]
    assert len(received) == 2 * 4
    assert {task.name for task in received if task.track.ranks == "stage 2, rank 1"} == {
        f"receive values {number}" for number in (1, 2, 3, 4)
    }


def test_a_stage_never_does_two_things_and_every_pass_is_there_once():
    plan = pipeline("1F1B", (3.0, 4.0, 5.0), 6, way=0.25, once=1.0)
    found = pipeline_timeline(plan)
    for rank in range(3):
        spans = sorted(
            (start, start + task.seconds, task.name)
            for task, start in zip(found.tasks, found.starts, strict=True)
            if task.track[:2] == (f"stage {rank + 1}, rank {rank}", Stream.COMPUTE)
        )
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))
        passes = [f"{kind} {n}" for kind in ("forward", "backward") for n in range(1, 7)]
        assert sorted(name for _, _, name in spans) == sorted([*passes, "sum gradients and update"])


def test_an_asynchronous_pipeline_is_never_empty_between_updates():
    plan = pipeline("async stash", (3.0, 3.0), once=1.0)
    assert mini_batches(plan) == 6
    found = pipeline_timeline(plan)
    updates = [
        start + task.seconds
        for task, start in zip(found.tasks, found.starts, strict=True)
        if task.kind == "update" and task.track.ranks == "stage 2, rank 1"
    ]
    assert len(updates) == 6
    steady = step_seconds("async stash", times((3.0, 3.0), once=1.0), 1)
    assert (updates[-1] - updates[-3]) / 2 / MS == pytest.approx(steady)


def test_transfers_belong_to_the_stage_that_needs_them():
    plan = pipeline("GPipe", (3.0, 3.0), 2)
    plan = replace(
        plan,
        transfers=(
            replace(moved("x", "layer0", "forward", "all_gather dp", 1.0, 1.0), times=2),
            replace(moved("layer1.weight", "layer1", "backward", "all_reduce dp", 1.0, 4.0)),
        ),
    )
    first, second = works_of(plan)
    assert first.forward / MS == pytest.approx(1.0 + 0.5)
    assert second.once / MS == pytest.approx(4.0)


@pytest.mark.parametrize(
    "schedule, groups, seconds",
    [
        ("Interleaved1F1B", 2, (3.0, 6.0, 3.0, 1.5)),
        ("InterleavedZeroBubble", 2, (3.0, 3.0)),
        ("InterleavedZeroBubble", 2, (3.0, 6.0, 3.0, 1.5)),
        ("ZBVZeroBubble", 2, (3.0, 6.0, 3.0, 1.5)),
    ],
)
def test_groups_of_several_stages_take_what_their_passes_say(schedule, groups, seconds):
    plan = pipeline(schedule, seconds, 4, way=0.25, once=1.0)
    plan = replace(plan, mesh=Mesh.parse(f"pp={groups}"))
    reads = [(f"layer{i - 1}",) * (i > 0) + op.reads for i, op in enumerate(plan.ops)]
    ops = (replace(op, reads=r) for op, r in zip(plan.ops, reads, strict=True))
    plan = replace(plan, ops=tuple(ops))
    assert [work.splits for work in works_of(plan)] == [False] + [True] * (len(seconds) - 1)
    homes = plan.pipeline.homes
    moved = [s > 0 and homes[s] != homes[s - 1] for s in range(plan.stages)]
    given = [
        replace(time, splits=s > 0, receives=time.receives * moved[s])
        for s, time in enumerate(times(seconds, way=0.25, once=1.0))
    ]
    expected = step_seconds(schedule, given, 4, groups)
    found = pipeline_timeline(plan)
    assert found.seconds / MS == pytest.approx(expected)
    names = {task.track.ranks for task in found.tasks}
    if len(seconds) == 4:
        first = "stages 1, 4, rank 0" if schedule == "ZBVZeroBubble" else "stages 1, 3, rank 0"
        assert first in names
    halves = {task.name.split(" 1")[0] for task in found.tasks if task.kind == "backward"}
    assert ("backward to weights" in halves) == (schedule != "Interleaved1F1B")


def test_a_weight_that_is_read_twice_keeps_its_stage_from_splitting():
    plan = pipeline("InterleavedZeroBubble", (3.0, 3.0), 4)
    first, second = plan.ops
    second = replace(second, reads=("layer0", "layer1.weight"))
    again = replace(second, name="again", reads=("layer1", "layer1.weight"))
    for ops, splits in (((first, second), True), ((first, second, again), False)):
        assert [work.splits for work in works_of(replace(plan, ops=ops))] == [False, splits]
