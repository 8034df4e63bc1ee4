"""Planned steps as tasks: what waits for what, worked out by hand."""

from dataclasses import replace

import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.plan import PlanError
from shardwright.ir.timeline import Stream
from shardwright.simulate.time.comm_buckets import flights_of, in_buckets
from shardwright.simulate.time.step import settled_seconds, tasks_of, timeline
from tests.harness.plans import MIB, MS, moved, op, parameter, simple

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


def test_sums_are_waited_for_when_the_last_is_on_its_way():
    tasks = tasks_of(layers(overlap=1.0))
    sums = [
        number for number, task in enumerate(tasks) if task.track.stream is Stream.COMMUNICATION
    ]
    third, second, first = sums
    backward = {
        t.where: n for n, t in enumerate(tasks) if t.kind == "backward" and t.where in t.name
    }
    assert backward["third"] in tasks[third].after
    assert not {first, second, third} & set(tasks[backward["first"]].after)
    update = tasks[next(n for n, t in enumerate(tasks) if t.kind == "update")]
    assert {first, second, third} <= set(update.after)


def test_sums_that_take_longer_than_the_layers_before_do_not_hold_them_up():
    plan = layers(overlap=1.0)
    slow = replace(plan.transfers[2], seconds=3 * MS)
    plan = replace(plan, transfers=(*plan.transfers[:2], slow))
    # The third layer's sum ends at 8 ms, the second's at 9, the first's at 10: after all computing.
    assert ms(plan) == pytest.approx(5 + 3 + 1 + 1 + 1.5)


def test_small_gradients_are_summed_together_in_the_end():
    plan = layers(overlap=1.0, mib=1 / 16)
    names = [t.name for t in tasks_of(plan) if t.track.stream is Stream.COMMUNICATION]
    assert names == ["sum gradients of 3 parameters"]
    assert ms(plan) == pytest.approx(9 + 3 + 1.5)


def sharded(overlap=0.0, mib=25.0, again=True):
    """The same layers, each weight gathered in 2 ms forward and backward, its gradient in 1 ms."""
    plan = layers(overlap)
    ways = [("forward", "all_gather", 2.0), ("backward", "reduce_scatter", 1.0)]
    ways += [("again", "all_gather", 2.0)] * again
    transfers = tuple(
        moved(f"{one.name}.weight", one.name, phase, f"{kind} dp", mib, ms)
        for one in plan.ops
        for phase, kind, ms in ways
    )
    ops = tuple(replace(one, reads=(f"{one.name}.weight",)) for one in plan.ops)
    plan = replace(plan, ops=ops, transfers=transfers)
    parts = (*plan.ops, *plan.transfers, *plan.parameters)
    return replace(plan, step_seconds=sum(part.seconds for part in parts))


def starts(plan):
    """When what is communicated begins, in ms, with its name."""
    found = timeline(plan)
    return [
        (round(start / MS, 6), task.name)
        for start, task in zip(found.starts, found.tasks, strict=True)
        if task.track.stream is Stream.COMMUNICATION
    ]


def test_sharded_parameters_that_hide_nothing_take_their_serial_sum():
    assert ms(sharded()) == pytest.approx(9 + 15 + 1.5)
    assert settled_seconds(sharded()) == sharded().step_seconds
    assert ms(sharded(mib=0.1)) == pytest.approx(9 + 15 + 1.5)


def test_copies_set_out_one_bucket_ahead_and_gradients_leave_one_at_a_time():
    plan = sharded(overlap=1.0)
    assert [flight.at for flight in flights_of(plan)] == [0, 1, 2]
    assert starts(plan) == [
        (0, "gather 1 parameters"),
        (2, "gather 1 parameters"),
        (4, "gather 1 parameters"),  # sent for when the second layer's copy is awaited, at 3
        (7, "gather 1 parameters again"),  # the third's, for which the backward pass waits
        (9, "gather 1 parameters again"),  # the second's, behind the third's gradients
        (11, "scatter gradients of 1 parameters"),
        (12, "gather 1 parameters again"),
        (14, "scatter gradients of 1 parameters"),
        (16, "scatter gradients of 1 parameters"),
    ]
    assert ms(plan) == pytest.approx(17 + 1.5)
    assert settled_seconds(plan) == pytest.approx(18.5 * MS)
    assert ms(sharded(overlap=0.5)) > ms(plan)


def test_what_is_waited_for_soon_hides_by_its_own_part():
    plan = sharded(overlap=1.0)
    assert ms(replace(plan, gather_overlap=0.5)) == pytest.approx(ms(sharded(overlap=0.5)))
    assert ms(replace(plan, gather_overlap=0.0)) == pytest.approx(9 + 15 + 1.5)
    some = replace(sharded(), gather_overlap=0.5)
    assert settled_seconds(some) == settled_seconds(sharded(overlap=0.5))
    sums = layers(overlap=0.5)
    assert ms(replace(sums, gather_overlap=0.0)) == ms(sums)


def test_small_copies_share_a_bucket_and_those_that_are_kept_come_once():
    plan = sharded(overlap=1.0, mib=0.25, again=False)
    assert [len(flight.forward) for flight in flights_of(plan)] == [3]
    names = [name for _, name in starts(plan)]
    assert names == ["gather 3 parameters", "scatter gradients of 3 parameters"]
    assert ms(plan) == pytest.approx(9 + 6 + 3 + 1.5)


def test_steps_in_micro_batches_have_the_timeline_that_was_simulated():
    plan = layers(micro_batches=2)
    with pytest.raises(PlanError, match="recost"):
        timeline(plan)
    known = timeline(layers())
    assert timeline(replace(plan, timeline=known)) is known


def test_what_is_gathered_otherwise_is_waited_for():
    plan = sharded(overlap=1.0)
    again = replace(plan, ops=(replace(plan.ops[0], segment=1), *plan.ops[1:]))
    assert [flight.at for flight in flights_of(again)] == [1, 2]
    tied = replace(plan.ops[0], reads=("first.weight", "third.weight"))
    assert [f.at for f in flights_of(replace(plan, ops=(tied, *plan.ops[1:])))] == [0, 1]
    other = tuple(
        replace(t, collectives=("all_to_all dp",)) if t.value == "second.weight" else t
        for t in plan.transfers
    )
    assert [flight.at for flight in flights_of(replace(plan, transfers=other))] == [0, 2]
    assert ms(replace(plan, transfers=other)) > ms(plan)


def test_a_gradient_may_be_summed_over_another_axis_too():
    plan = sharded()
    both = tuple(
        replace(t, collectives=("reduce_scatter dp", "all_reduce tp"))
        if t.phase == "backward" and t.value != "third.weight"
        else t
        for t in sharded(mib=0.25).transfers
    )
    flights = flights_of(replace(plan, transfers=both))
    assert [(flight.at, len(flight.backward)) for flight in flights] == [(0, 2), (2, 1)]


def test_a_parameter_that_two_read_is_summed_for_each():
    plan = layers(overlap=1.0)
    tied = replace(plan.transfers[1], value="first.weight")
    plan = replace(plan, transfers=(plan.transfers[0], tied, plan.transfers[2]))
    assert in_buckets(plan) == [False, False, True]


def test_pieces_run_forward_again_right_before_their_gradients():
    plan = layers()
    ops = tuple(replace(one, segment=1, seconds=4 * MS) for one in plan.ops[:2])
    plan = replace(plan, ops=(*ops, plan.ops[2]), transfers=())
    kinds = [(t.kind, t.where) for t in tasks_of(plan) if t.kind != "update"]
    assert kinds == [
        *(("forward", n) for n in ("first", "second", "third")),
        ("backward", "third"),
        *(("again", n) for n in ("first", "second")),
        *(("backward", n) for n in ("second", "first")),
    ]
    assert ms(plan) == pytest.approx(4 + 4 + 3 + 1.5)


def test_what_the_step_returns_is_brought_before_the_backward_pass():
    plan = layers()
    loss = moved("loss", "", "forward", "all_reduce dp", 4 / MIB, 0.25)
    plan = replace(plan, transfers=(*plan.transfers, loss))
    tasks = tasks_of(plan)
    place = next(n for n, t in enumerate(tasks) if t.name == "all_reduce dp: loss")
    assert [t.kind for t in tasks[:place]] == ["forward"] * 3
    assert ms(plan) == pytest.approx(13.75)


def test_messages_along_two_axes_delay_each_other_by_what_they_share():
    mesh = Mesh.parse("dp=2 tp=2")
    plan = replace(layers(overlap=1.0), mesh=mesh)
    # The second layer's values are summed over tp while its own gradients' sum is on its way.
    blocked = moved("first", "second", "backward", "all_reduce tp", 1, 4.0)
    plan = replace(plan, transfers=(*plan.transfers, blocked))
    assert ms(plan) == pytest.approx(9 + 4 + 1 + 1.5)  # the third's sum is over when it sets out
    long = tuple(
        replace(t, seconds=6 * MS) if t.value == "third.weight" else t for t in plan.transfers
    )
    shared, half, apart = (
        ms(replace(plan, transfers=long, contention=part)) for part in (1.0, 0.5, 0.0)
    )
    # The third's sum goes from 5 to 11; tp's 4 ms begin at 11, at 8 (half of 6 after 5), or at 7.
    assert (shared, half, apart) == pytest.approx((19.5, 16.5, 15.5))
    for part in (1.0, 0.5, 0.0):
        serial = replace(plan, transfers=long, contention=part, overlap=0.0)
        assert ms(serial) == pytest.approx(9 + 6 + 1 + 1 + 4 + 1.5)
