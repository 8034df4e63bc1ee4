"""Asynchronous pipelines on a timeline: as long as their law says, and never empty."""

from dataclasses import replace

import pytest

from shardwright.ir.layout import Mesh
from shardwright.simulate.time.async_pipeline import async_timeline, mini_batches, works_of
from shardwright.simulate.time.pipelines import StageTime, step_seconds
from tests.harness.plans import MS, moved, op, parameter, simple


def pipeline(seconds, way=0.0, once=0.0):
    """A stage of one operator for each of `seconds`, a third of them forward; all in ms."""
    names = [f"layer{i}" for i in range(len(seconds))]
    inner = Mesh.parse("dp=1")
    return replace(
        simple(),
        mesh=Mesh.parse(f"pp={len(seconds)}"),
        stages=len(seconds),
        schedule="async stash",
        cuts=tuple(names[1:]),
        receive_seconds=(way * MS,) * (len(seconds) - 1),
        ops=tuple(
            replace(
                op(name, "linear", name, 1, "m", "dp:R", ms, mesh=inner),
                backward_seconds=2 / 3 * ms * MS,
                reads=(f"{name}.weight",),
            )
            for name, ms in zip(names, seconds, strict=True)
        ),
        parameters=tuple(parameter(f"{n}.weight", "dp:R", ms=once, mesh=inner) for n in names),
        transfers=(),
    )


@pytest.mark.parametrize("seconds", [(3.0, 3.0), (3.0, 6.0)])
def test_an_asynchronous_pipeline_is_never_empty_between_updates(seconds):
    plan = pipeline(seconds, once=1.0)
    assert mini_batches(plan) == 6 and mini_batches(simple()) == 1
    found = async_timeline(plan)
    updates = [
        start + task.seconds
        for task, start in zip(found.tasks, found.starts, strict=True)
        if task.kind == "update" and task.track.ranks == "stage 2, rank 1"
    ]
    assert len(updates) == 6
    passes = [task.name for task in found.tasks if task.kind == "forward" and task.track.ranks]
    assert passes.count("forward 1") == passes.count("forward 6") == 2 and len(passes) == 12 + 6
    steady = step_seconds("async stash", [StageTime(s, 1.0) for s in seconds], 1)
    assert (updates[-1] - updates[-3]) / 2 / MS == pytest.approx(steady)


def test_transfers_belong_to_the_stage_that_needs_them():
    transfers = (
        moved("x", "layer0", "forward", "all_gather dp", 1.0, 1.0),
        moved("layer1.weight", "layer1", "backward", "all_reduce dp", 1.0, 4.0),
    )
    first, second = works_of(replace(pipeline((3.0, 3.0)), transfers=transfers))
    assert (first.forward / MS, first.backward / MS) == pytest.approx((1.0 + 1.0, 2.0))
    assert second.backward / MS == pytest.approx(2.0 + 4.0)
