"""Step programs played on streams and links: times computed by hand, and laws."""

import random
from dataclasses import replace
from functools import partial
from math import sqrt

import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.redistribution import Collective
from shardwright.ir.timeline import Stream
from shardwright.program.instructions import Move
from shardwright.program.step.folding.unrolled import in_order
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Free,
    Part,
    Transfer,
    Update,
    Wait,
)
from shardwright.program.step.optimize import PASSES, optimized
from shardwright.program.step.passes.delay_waits import delay_waits
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.step_program import StepProgram
from shardwright.simulate.costs.update import UpdatePrices
from shardwright.simulate.time.steady_state import SteadyStateError, played
from shardwright.simulate.time.step_program import (
    OpSeconds,
    StepPrices,
    TransferSeconds,
    simulated,
)
from shardwright.simulate.time.stragglers import at_a_wait
from tests.unit.program.lower.test_rank_program import GRAPH, STRATEGIES
from tests.unit.program.step.test_step_program import naive
from tests.unit.simulate.time.test_stragglers import LATE

UPDATE = Update((("v", "x/there"), ("w", "x/there")))
OPS = {"a": OpSeconds(2.0, 4.0, "m.a"), "b": OpSeconds(3.0, 6.0, "m.b")}


def run(name):
    return Forward(0, 0, name, (), (), True, ops=(name,))


def back(name):
    return Backward(0, name, (), ())


def start(value, channel="dp", kind=Collective.ALL_REDUCE):
    move = Move(channel, kind, (1,), -1, -1, 0, 0, True)
    part = Part(value, f"{value}/there", (1,), (), move, (1,), "float32")
    return Transfer(kind, channel, (part,), f"t/{value}")


def wait(value):
    return Wait(f"t/{value}", (f"{value}/there",))


def program(*instructions):
    return StepProgram(Mesh.parse("dp=2 tp=2"), 0, (), (), (), (), (), instructions, (), (), ())


def seconds(order, sent, hidden=1.0, **further):
    """Seconds of a program whose transfers take what `sent` says, by their value."""
    prices = StepPrices(
        OPS,
        lambda one: TransferSeconds(sent[one.parts[0].value]),
        lambda _one, _purpose: hidden,
        further.pop("links", {"dp": "dp", "tp": "tp"}),
        **further,
    )
    return simulated(program(*order), prices, 4).seconds


def test_what_is_waited_for_at_once_is_not_hidden():
    order = run("a"), start("x"), wait("x"), run("b")
    assert seconds(order, {"x": 1.5}) == 2 + 1.5 + 3
    freed = run("a"), start("x"), Free(("x",)), wait("x"), run("b")
    assert seconds(freed, {"x": 1.5}, hidden=0.0) == 2 + 1.5 + 3


@pytest.mark.parametrize(
    "sent, hidden, total",
    [
        (1.0, 1.0, 5.0),  # ends while b runs
        (4.0, 1.0, 6.0),  # a, then 4 of which b hides 3
        (1.0, 0.0, 6.0),  # nothing hides: b starts when it has ended
        (1.0, 0.5, 5.5),  # b starts half a second later
        (4.0, 0.5, 7.0),  # a 2, slowed 2, b 3: longer than 2 + 4
        (8.0, 0.5, 10.0),  # slowed by 4, b 3; the transfer takes longer
    ],
)
def test_operators_hide_what_is_in_flight(sent, hidden, total):
    order = run("a"), start("x"), run("b"), wait("x")
    assert seconds(order, {"x": sent}, hidden) == total


def fluid(order, lasting, hidden):
    """Seconds of runs and starts in order: runs go slower while a transfer is on the link."""
    now, free, ends = 0.0, 0.0, []
    for what, number in order:
        if what == "start":
            free = max(free, now) + lasting[number]
            ends.append((free - lasting[number], free, hidden[number]))
            continue
        left = OPS[number].forward
        for begin, end, part in ends:  # in the order of the link
            beside = max(0.0, end - max(now, begin))
            if beside and now + left > begin:
                now, left = max(now, begin), left - max(0.0, begin - now)
                done = min(left, beside * part)
                now, left = now + (beside if done < left else done / part), left - done
        now += left
    return max(now, free)


def test_operators_run_slower_while_transfers_are_in_flight():
    rng, slower = random.Random(1), 0
    for _ in range(200):
        names = [f"t{i}" for i in range(rng.randint(1, 5))]
        order = [("start", name) for name in names] + [("run", rng.choice("ab")) for _ in range(6)]
        rng.shuffle(order)
        order.sort(key=lambda one: one[1] != "t0")  # so that the link is in use from the start
        lasting = {name: rng.uniform(0.1, 4) for name in names}
        hidden = {name: rng.uniform(0.2, 0.9) for name in names}
        prices = StepPrices(
            OPS,
            lambda one, lasting=lasting: TransferSeconds(lasting[one.parts[0].value]),
            lambda one, _purpose, hidden=hidden: hidden[one.parts[0].value],
            {"dp": "dp", "tp": "tp"},
        )
        started = [start(name) if what == "start" else run(name) for what, name in order]
        waits = [wait(name) for what, name in order if what == "start"]
        timeline = simulated(program(*started, *waits), prices, 2)
        assert timeline.seconds == pytest.approx(fluid(order, lasting, hidden), rel=1e-9)
        slower += any(task.idle and task.seconds > 0.1 for task in timeline.tasks)
    assert slower > 150


def test_a_transfer_of_which_nothing_is_hidden_is_due_at_its_wait():
    """What its operators send meanwhile goes as if it were not there."""
    order = start("x"), run("a"), start("y", "tp"), wait("y"), run("b"), wait("x")
    assert seconds(order, {"x": 4.0, "y": 1.0}, 0.0) == 2 + 1 + 3 + 4
    prices = StepPrices(
        OPS,
        lambda _one: TransferSeconds(4.0),
        lambda _one, _purpose: 0.0,
        {"dp": "dp", "tp": "tp"},
    )
    timeline = simulated(program(start("x"), run("a"), run("b"), wait("x")), prices, 2)
    assert [task.name for task in timeline.tasks][-1] == "slowed down: all_reduce: x"
    assert timeline.starts[-1] == 5.0


def test_seconds_of_waiting_for_others_are_not_due_again():
    """Here y waits on the link behind x: nothing runs meanwhile, and then nothing is left of x."""
    order = start("x"), start("y"), wait("y"), run("a"), wait("x")
    assert seconds(order, {"x": 4.0, "y": 1.0}, 0.0) == 4 + 1 + 2
    assert seconds(order, {"x": 4.0, "y": 1.0}, 0.5) == 4 + 1 + 2
    # On a link of its own y ends before: 3 of 4 seconds of x are left, and due.
    apart = start("x"), start("y", "tp"), wait("y"), run("a"), wait("x")
    assert seconds(apart, {"x": 4.0, "y": 1.0}, 0.0) == 1 + 2 + 4


def test_a_run_behind_a_wait_starts_when_the_transfer_has_ended():
    order = start("x"), run("a"), wait("x"), run("b")
    assert seconds(order, {"x": 5.0}) == 5 + 3
    assert seconds(order, {"x": 1.0}) == 2 + 3


def test_a_channel_runs_its_transfers_in_order():
    order = start("x"), start("y"), run("a"), wait("y"), run("b"), wait("x")
    assert seconds(order, {"x": 4.0, "y": 1.0}) == 4 + 1 + 3


def test_channels_of_one_link_take_turns_and_others_do_not():
    order = start("x", "dp"), start("y", "tp"), run("a"), wait("x"), wait("y"), run("b")
    sent = {"x": 4.0, "y": 3.0}
    assert seconds(order, sent) == 4 + 3, "both at once, and b behind the longer one"
    assert seconds(order, sent, links={"dp": "dp tp", "tp": "dp tp"}) == 4 + 3 + 3
    # x delays y by half of its time, y x by half of its own: y is there after 2 + 3.
    assert seconds(order, sent, contention=lambda _one, _other: 0.5) == 5 + 3


def test_backward_passes_run_the_operators_of_their_call():
    order = run("a"), run("b"), back("b"), start("x"), back("a"), wait("x")
    assert seconds(order, {"x": 1.0}) == 2 + 3 + 6 + 4
    assert seconds(order, {"x": 9.0}) == 2 + 3 + 6 + 9
    again = run("a"), run("b"), replace(run("a"), again=True), back("b"), back("a")
    assert seconds(again, {}) == 2 + 3 + 2 + 6 + 4


def test_the_update_comes_last():
    order = run("a"), back("a"), start("x"), wait("x"), UPDATE
    assert seconds(order, {"x": 1.0}, update=UpdatePrices({"v": 3.0, "w": 4.0})) == 2 + 4 + 1 + 7
    assert seconds(order[:-1], {"x": 1.0}, update=UpdatePrices({"v": 3.0, "w": 4.0})) == 2 + 4 + 1


def test_buffers_are_filled_before_and_emptied_after():
    prices = StepPrices(
        OPS, lambda _one: TransferSeconds(2.0, 0.5, 0.25), lambda _one, _purpose: 1.0, {"dp": "dp"}
    )
    timeline = simulated(program(start("x"), run("b"), wait("x"), run("a")), prices, 2)
    assert timeline.seconds == 0.5 + 3 + 0.25 + 2
    order = start("x"), wait("x"), run("a")
    assert simulated(program(*order), prices, 2).seconds == 0.5 + 2 + 0.25 + 2


def test_collectives_inside_of_an_operator_are_waited_for():
    split = OpSeconds(2.0, 4.0, "m", (("tp", 0.5),), (("tp", 1.0), ("dp", 0.25)))
    prices = StepPrices({"a": split}, None, None, {"dp": "dp", "tp": "tp"})
    assert simulated(program(run("a"), back("a")), prices, 4).seconds == 0.5 + 2 + 1.25 + 4


def test_ranks_wait_for_the_slowest_less_what_they_computed_since():
    """A rank that computed for t seconds is sqrt(t) late here, and slack helps at once."""

    def late(since, slack):
        return max(0.0, sqrt(since) - slack), 0.0

    # update 9 + a 2 + 5 more before the first wait; then b alone, since ranks have met.
    ops = {**OPS, "c": OpSeconds(5.0, 0.0)}
    order = run("a"), run("c"), start("x"), wait("x"), run("b"), start("y"), run("a"), wait("y")
    order = *order, UPDATE
    prices = StepPrices(
        ops,
        lambda _one: TransferSeconds(1.0),
        lambda _one, _purpose: 1.0,
        {"dp": "dp"},
        late=late,
        update=UpdatePrices({"v": 9.0}),
    )
    # x takes 1 + sqrt(16) more; y is waited for 2 s after it started: max(0, sqrt(5) - 2) more.
    y = max(2.0, 1 + sqrt(5) - 2)
    assert simulated(program(*order), prices, 2).seconds == pytest.approx(7 + 5 + 3 + y + 9)


def test_tasks_say_what_runs():
    prices = StepPrices(
        OPS, lambda _one: TransferSeconds(2.0), lambda _one, _purpose: 0.5, {"dp": "dp tp"}
    )
    both = Forward(0, 0, "r", (), (), True, ops=("a", "b", "cast"))
    timeline = simulated(program(both, start("x"), Backward(0, "r", (), ()), wait("x")), prices, 8)
    tasks = [(t.name, t.kind, t.where, t.track.stream, t.idle) for t in timeline.tasks]
    assert tasks == [
        ("m: 2 operators", "forward", "m", Stream.COMPUTE, False),
        ("all_reduce: x", "forward", "", Stream.COMMUNICATION, False),
        ("m: 2 operators", "backward", "m", Stream.COMPUTE, False),
        ("slowed down: all_reduce: x", "backward", "", Stream.COMPUTE, True),
    ]
    assert timeline.tasks[1].track == ("each of 8 ranks", Stream.COMMUNICATION, "dp tp")


# Laws, on programs that are lowered.

ALL = {op.name: OpSeconds(1e-3, 2e-3) for op in GRAPH.ops}


def priced(hidden, per_byte=1e-6):
    return StepPrices(
        ALL,
        lambda one: TransferSeconds(1e-4 + per_byte * one.bytes),
        lambda _one, _purpose: hidden,
        {"dp": "dp", "tp": "tp"},
        lambda _one, _other: 0.3,
    )


@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_is_never_faster_than_operators_or_any_channel_alone(strategy, hidden):
    prices = priced(hidden)
    for passes in (PASSES, (), PASSES[:2]):
        made = optimized(naive(strategy, count=3), passes)
        timeline = simulated(made, prices, 2)
        computed = sum(
            t.seconds for t in timeline.tasks if t.track.stream is Stream.COMPUTE and not t.idle
        )
        assert computed == pytest.approx(3 * len(GRAPH.ops) * 3e-3)
        assert timeline.seconds >= computed * (1 - 1e-12)
        for channel in made.mesh.names:
            sent = [prices.transfer(t).link for t in made.transfers() if t.channel == channel]
            assert timeline.seconds >= sum(sent) * (1 - 1e-12)


@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefetch_and_delayed_waits_never_make_a_step_slower(strategy, hidden):
    prices = priced(hidden)
    start = naive(strategy, count=3)
    slowest = simulated(start, prices, 2).seconds
    for passes in ((prefetch,), (delay_waits,), (prefetch, delay_waits)):
        assert simulated(optimized(start, passes), prices, 2).seconds <= slowest * (1 + 1e-12)
    if strategy == "fully sharded" and hidden == 1.0:
        all_of = simulated(optimized(start, (prefetch, delay_waits)), prices, 2).seconds
        moved = sum(prices.transfer(one).link for one in start.transfers())
        assert all_of < slowest - 0.5 * moved, "most of it is hidden"
    buckets = simulated(optimized(start), prices, 2).seconds
    assert buckets <= slowest * (1 + 1e-12), "fewer launches, and what a bucket moves is the same"


@pytest.mark.parametrize("late", [None, partial(at_a_wait, LATE)])
@pytest.mark.parametrize("hidden", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_micro_batches_stand_for_five(strategy, hidden, late):
    prices = replace(
        priced(hidden, per_byte=0.0), late=late
    )  # tiles of five micro-batches of five samples are smaller
    for passes in (PASSES, ()):
        whole = simulated(optimized(naive(strategy, count=5), passes), prices, 2)
        few = simulated(optimized(naive(strategy, count=3), passes), prices, 2, 5)
        assert few.seconds == pytest.approx(whole.seconds, rel=1e-12)
        assert len(few.tasks) == len(whole.tasks)
        if late is not None and strategy != "data parallel":
            soon = simulated(
                optimized(naive(strategy, count=3), passes), replace(prices, late=None), 2, 5
            )
            assert few.seconds > soon.seconds


def test_micro_batches_that_leave_more_than_they_find_do_not_repeat():
    made = naive("fully sharded", count=3)
    order = list(made.instructions)
    for at in range(len(order)):
        if isinstance(order[at], Wait) and any(name.endswith("@1") for name in order[at].results):
            late = order.pop(at)
            break
    order.append(late)
    with pytest.raises(SteadyStateError):
        played(in_order(replace(made, instructions=tuple(order))), 3, 5)
