"""Pipelines on a timeline: as long as the sweep over passes says, which knows no tasks."""

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.cost.pipeline_step import mini_batches, pipeline_timeline, works_of
from shardwright.cost.pipelines import StageTime, step_seconds
from shardwright.cost.timeline import Stream
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import PipelineError
from tests.plans import MS, moved, op, parameter, simple


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
        ways=(way * MS,) * (len(seconds) - 1),
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
            if task.track == (f"stage {rank + 1}, rank {rank}", Stream.COMPUTE)
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


def test_groups_of_several_stages_are_said_to_have_no_timeline():
    with pytest.raises(PipelineError, match="Interleaved1F1B gives a group several stages"):
        pipeline_timeline(replace(pipeline("GPipe", (3.0, 3.0)), schedule="Interleaved1F1B"))
