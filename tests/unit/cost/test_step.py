"""Planned steps as tasks: what waits for what, worked out by hand."""

from dataclasses import replace

import pytest

from shardwright.cost.step import in_buckets, settled_seconds, tasks_of, timeline
from shardwright.cost.timeline import Stream
from tests.plans import MIB, MS, moved, op, parameter, simple

HERE, LINK = (
    lambda plan, stream=stream: next(t.track for t in tasks_of(plan) if t.track.stream is stream)
    for stream in (Stream.COMPUTE, Stream.COMMUNICATION)
)


def layers(overlap=0.0, mib=25.0, **changes):
    """Three layers of 3 ms, 2 of them backward, whose gradients of `mib` take 1 ms to sum."""
    mesh = simple().mesh
    names = ["first", "second", "third"]
    plan = replace(
        simple(),
        ops=tuple(
            replace(op(n, "linear", n, 1, "m", "dp:S(0)", 3.0, mesh=mesh), backward_seconds=2 * MS)
            for n in names
        ),
        parameters=tuple(parameter(f"{n}.weight", "dp:R", ms=0.5, mesh=mesh) for n in names),
        transfers=tuple(
            moved(f"{n}.weight", n, "backward", "all_reduce dp", mib, 1.0) for n in names
        ),
        overlap=overlap,
        **changes,
    )
    parts = (*plan.ops, *plan.transfers, *plan.parameters)
    return replace(plan, step_seconds=sum(part.seconds for part in parts))


def ms(plan):
    return timeline(plan).seconds / MS


def test_without_overlap_a_step_is_its_serial_sum():
    assert ms(layers()) == pytest.approx(9 + 3 + 1.5)
    assert settled_seconds(layers()) == layers().step_seconds


def test_sums_hide_behind_the_gradients_of_the_layers_before():
    # The sums of the third and second layer run behind the backward pass, the first's does not.
    plan = layers(overlap=1.0)
    assert all(in_buckets(plan))
    assert ms(plan) == pytest.approx(9 + 1 + 1.5)
    assert settled_seconds(plan) == pytest.approx(11.5 * MS)
    half = timeline(layers(overlap=0.5))  # the device loses half of the time of each sum
    assert half.seconds / MS == pytest.approx(9 + 2 * 0.5 + 1 + 1.5)
    track = LINK(plan)
    assert timeline(plan).alone(track, HERE(plan)) == pytest.approx(1 * MS)


def test_a_bucket_is_waited_for_when_the_next_is_on_its_way():
    tasks = tasks_of(layers(overlap=1.0))
    sums = [
        number for number, task in enumerate(tasks) if task.track.stream is Stream.COMMUNICATION
    ]
    third, second, first = sums
    backward = {
        t.where: n for n, t in enumerate(tasks) if t.kind == "backward" and t.where in t.name
    }
    assert backward["third"] in tasks[third].after
    assert third in tasks[backward["first"]].after  # not yet for that of the second layer
    update = tasks[next(n for n, t in enumerate(tasks) if t.kind == "update")]
    assert {first, second} <= set(update.after)


def test_small_gradients_are_summed_together_in_the_end():
    plan = layers(overlap=1.0, mib=1.0)
    names = [t.name for t in tasks_of(plan) if t.track.stream is Stream.COMMUNICATION]
    assert names == ["sum gradients of 3 parameters"]
    assert ms(plan) == pytest.approx(9 + 3 + 1.5)


def test_what_is_gathered_or_scattered_is_waited_for():
    plan = layers(overlap=1.0)
    gather = moved("second.weight", "second", "forward", "all_gather dp", 25, 2.0)
    scatter = moved("second.weight", "second", "backward", "reduce_scatter dp", 25, 1.0)
    transfers = (plan.transfers[0], gather, scatter, plan.transfers[2])
    plan = replace(plan, transfers=transfers)
    assert in_buckets(plan) == [True, False, False, True]
    # The third layer's sum is still hidden behind the second's gradients, which are not.
    assert ms(plan) == pytest.approx(9 + 2 + 1 + 1 + 1.5)


def test_a_parameter_that_two_read_is_summed_for_each():
    plan = layers(overlap=1.0)
    tied = replace(plan.transfers[1], value="first.weight")
    plan = replace(plan, transfers=(plan.transfers[0], tied, plan.transfers[2]))
    assert in_buckets(plan) == [False, False, True]


def test_pieces_run_forward_again_right_before_their_gradients():
    plan = layers()
    ops = tuple(replace(one, piece=1, seconds=4 * MS) for one in plan.ops[:2])
    plan = replace(plan, ops=(*ops, plan.ops[2]), transfers=())
    kinds = [(t.kind, t.where) for t in tasks_of(plan) if t.kind != "update"]
    assert kinds == [
        *(("forward", n) for n in ("first", "second", "third")),
        ("backward", "third"),
        *(("again", n) for n in ("first", "second")),
        *(("backward", n) for n in ("second", "first")),
    ]
    assert ms(plan) == pytest.approx(4 + 4 + 3 + 1.5)


def test_micro_batches_follow_one_another_and_sum_in_the_end():
    plan = layers(overlap=1.0, micro_batches=2)
    gather = replace(moved("x", "second", "forward", "all_gather dp", 1, 3.0), times=2)
    plan = replace(plan, transfers=(*plan.transfers, gather))
    tasks = tasks_of(plan)
    assert not any(in_buckets(plan))
    assert sum(t.name.startswith("all_gather dp: x") for t in tasks) == 2
    assert ms(plan) == pytest.approx(9 + 3 + 3 + 1.5)
    assert [t.kind for t in tasks[-6:]] == ["backward"] * 3 + ["update"] * 3
    assert all(t.name.startswith("all_reduce dp: gradient of") for t in tasks[-6:-3])


def test_what_the_step_returns_is_brought_before_the_backward_pass():
    plan = layers()
    loss = moved("loss", "", "forward", "all_reduce dp", 4 / MIB, 0.25)
    plan = replace(plan, transfers=(*plan.transfers, loss))
    tasks = tasks_of(plan)
    place = next(n for n, t in enumerate(tasks) if t.name == "all_reduce dp: loss")
    assert [t.kind for t in tasks[:place]] == ["forward"] * 3
    assert ms(plan) == pytest.approx(13.75)
