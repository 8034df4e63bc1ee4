"""Step programs of all groups of a pipeline, played: bubbles by formula, links, and who waits."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from shardwright.ir.layout import Layout, Mesh
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.redistribution import Collective
from shardwright.ir.schedules.schedule import PipelineError
from shardwright.ir.timeline import Stream
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Move
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.lower.stages import splits_backward
from shardwright.program.step.channels import link
from shardwright.program.step.instructions import (
    Backward,
    Forward,
    Gradients,
    Part,
    Payload,
    Recv,
    Send,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.optimize import optimized
from shardwright.program.step.step_program import StepProgram
from shardwright.rules.analysis import analyze
from shardwright.simulate.time.pipelines import StageTime, step_seconds
from shardwright.simulate.time.stages import simulated_stages
from shardwright.simulate.time.step_program import OpSeconds, StepPrices, TransferSeconds
from shardwright.simulate.time.timeline import group_names
from shardwright.tracing.capture import capture_call

LAYERS = 8


class Chain(nn.Module):
    """Equal layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(LAYERS)))

    def forward(self, x):
        return self.layers(x).square().sum()


@cache
def chain():
    graph = capture_call(Chain(), (), {"x": torch.zeros(40, 4)}).graph
    return graph, analyze(graph)


def prices(way=0.0, **further):
    """A layer takes 1 s forward and 2 s backward, a message `way`."""
    graph, _ = chain()
    ops = {
        op.name: OpSeconds(1.0, 2.0, op.source.module) for op in graph.ops if len(op.operands) == 2
    }
    assert len(ops) == LAYERS
    given = {"links": {"dp": "dp"}, "message": lambda _one: way} | further
    return StepPrices(ops, lambda _one: TransferSeconds(0.0), lambda *_: 1.0, **given)


@cache
def staged(schedule, groups, stages, count):
    graph, analysis = chain()
    mesh = Mesh.parse("dp=1")
    layers = [op.name for op in graph.ops if len(op.operands) == 2]
    cuts = tuple(layers[i * LAYERS // stages] for i in range(1, stages))
    tilings = {op.name: (None,) for op in graph.ops}
    storage = {name: Layout.replicated(mesh) for name in graph.trained}
    pipeline = Pipeline(cuts, schedule, groups)
    return StagedGraph(
        graph, analysis, Decisions(mesh, tilings, storage, frozenset(), {}, count, pipeline)
    )


def played(schedule, groups, stages, count, way=0.0):
    one = staged(schedule, groups, stages, count)
    programs = [optimized(lower_pipeline(one, rank)) for rank in range(groups)]
    names = group_names(one.pipeline.homes, one.decisions.stage_ranks)
    return simulated_stages(programs, [prices(way)] * groups, names)


SINGLE = [("GPipe", 4, 4, 8), ("1F1B", 4, 4, 8), ("1F1B", 2, 2, 5), ("GPipe", 2, 2, 1)]
SEVERAL = [("Interleaved1F1B", 4, 8, 8), ("LoopedBFS", 2, 8, 4), ("Interleaved1F1B", 2, 4, 4)]


@pytest.mark.parametrize("schedule, groups, stages, count", SINGLE + SEVERAL)
def test_the_bubble_is_that_of_the_formula(schedule, groups, stages, count):
    """M t + (P - 1) t, a vth of the bubble where groups have v stages (Megatron-LM)."""
    each = 3.0 * LAYERS / groups
    bubble = (groups - 1) * each * groups / stages
    found = played(schedule, groups, stages, count).seconds
    assert found == pytest.approx(count * each + bubble)


@pytest.mark.parametrize("way", [0.0, 0.25])
@pytest.mark.parametrize(
    "schedule, groups, stages, count",
    [*SINGLE, ("InterleavedZeroBubble", 4, 4, 8), ("ZBVZeroBubble", 2, 4, 8)],
)
def test_a_step_is_as_long_as_the_sweep_over_passes_says(schedule, groups, stages, count, way):
    """Which knows passes and messages, but no instructions."""
    one = staged(schedule, groups, stages, count)
    moved = [a != b for a, b in zip((-1, *one.pipeline.homes), one.pipeline.homes, strict=False)]
    seconds = 3.0 * LAYERS / stages
    times = [
        StageTime(seconds, 0.0, way * (stage > 0) * moved[stage], splits_backward(part))
        for stage, part in enumerate(one.parts)
    ]
    expected = step_seconds(schedule, times, count, groups)
    assert played(schedule, groups, stages, count, way).seconds == pytest.approx(expected)


FORWARD = Forward(0, 0, "a", (), (), True, ops=("a",))


def value(name="x"):
    return (Payload(name, (1,), "float32"),)


def program(group, *instructions, mesh="pp=2 dp=2"):
    return StepProgram(Mesh.parse(mesh), 2 * group, (), (), (), (), (), instructions, (), (), ())


def seconds(groups, ops=None, **further):
    """Seconds of these lists, of a rank of each group; transfers take a second."""
    ops, hidden = ops or {"a": OpSeconds(2.0, 4.0)}, further.pop("hidden", 1.0)
    given = {"message": lambda _one: 1.0, "links": {"dp": "dp"}} | further
    price = StepPrices(ops, lambda _one: TransferSeconds(1.0), lambda *_: hidden, **given)
    programs = [program(group, *one) for group, one in enumerate(groups)]
    return simulated_stages(programs, [price] * len(groups), ["first", "second"])


def collective(channel, handle):
    move = Move(channel, Collective.ALL_REDUCE, (1,), -1, -1, 0, 0, True)
    part = Part(handle, f"{handle}/there", (1,), (), move, (1,), "float32")
    return Transfer(Collective.ALL_REDUCE, channel, (part,), handle), Wait(
        handle, (f"{handle}/there",)
    )


SENT = Send(value(), link(0, 1), "to"), Wait("to", ())
RECEIVED = Recv(value(), link(0, 1), "from"), Wait("from", ("x",))


def test_a_message_goes_when_both_have_started_it():
    late_receiver = (FORWARD, FORWARD, *RECEIVED, FORWARD)
    assert seconds([(FORWARD, *SENT), late_receiver]).seconds == 4 + 1 + 2
    late_sender = (RECEIVED[0], FORWARD, RECEIVED[1], FORWARD)
    assert seconds([(FORWARD, FORWARD, *SENT), late_sender]).seconds == 4 + 1 + 2
    # Nobody computes slower, and who sends goes on.
    early = (SENT[0], FORWARD, FORWARD, SENT[1], FORWARD)
    assert seconds([early, (RECEIVED[0], FORWARD, RECEIVED[1])]).seconds == 6


@pytest.mark.parametrize("part, total", [(1.0, 2.0), (0.5, 1.5), (0.0, 1.0)])
def test_messages_and_collectives_delay_each_other_by_what_they_share(part, total):
    shared = {"contention": lambda _one, _other: part}
    first, then = (RECEIVED[0], *collective("dp", "sum"), RECEIVED[1]), SENT
    assert seconds([then, first], **shared).seconds == pytest.approx(total)


@pytest.mark.parametrize("part", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("message, beside", [(0.2, 0.2), (3.0, 1.0)])
def test_a_message_has_its_share_of_links_beside_a_longer_sum(part, message, beside):
    """It need not wait until a sum of a second, which the receiver has started, is over."""
    shared = {"contention": lambda _one, _other: part, "message": lambda _one: message}
    started, awaited = collective("dp", "sum")
    receiver = (started, *RECEIVED, FORWARD, awaited)
    found = seconds([SENT, receiver], **shared).seconds
    assert found == pytest.approx(message + part * beside + 2)


@pytest.mark.parametrize("hidden, total", [(0.0, 2 + 1 + 2 + 1), (0.5, 2.5 + 1 + 2.5)])
def test_sums_delay_messages_no_more_than_operators_beside_them(hidden, total):
    """Both groups start a sum of a second before they compute two.

    If nothing is hidden, it is due behind what they compute, and the first one has sent by then.
    If half is, half a second of computing beside it takes a whole one.
    """
    started, awaited = collective("dp", "sum")
    first, second = (started, FORWARD, *SENT, awaited), (*RECEIVED, started, FORWARD, awaited)
    assert seconds([first, second], hidden=hidden).seconds == pytest.approx(total)


def test_a_sum_over_groups_begins_when_the_last_has_come():
    summed = collective("pp", "sum")
    assert seconds([summed, (FORWARD, *summed, FORWARD)]).seconds == 2 + 1 + 2


def test_a_backward_pass_in_parts_takes_what_the_whole_does():
    one = staged("InterleavedZeroBubble", 2, 2, 2)
    split = optimized(lower_pipeline(one, 1))
    joined = replace(
        split,
        instructions=tuple(
            replace(i, part=Gradients.ALL) if isinstance(i, Backward) else i
            for i in split.instructions
            if not (isinstance(i, Backward) and i.part is Gradients.WEIGHTS)
        ),
    )
    assert any(isinstance(i, Backward) and i.part is Gradients.WEIGHTS for i in split.instructions)
    other = optimized(lower_pipeline(one, 0))
    found = [
        simulated_stages([other, last], [prices()] * 2, ["first", "second"])
        for last in (split, joined)
    ]
    busy = [
        sum(t.seconds for t in one.tasks if t.track == ("second", Stream.COMPUTE, ""))
        for one in found
    ]
    assert busy[0] == pytest.approx(busy[1]) and busy[0] == pytest.approx(2 * 3.0 * LAYERS / 2)


def test_groups_that_wait_for_each_other_are_refused():
    crossed = (Recv(value(), link(1, 0), "from"), Wait("from", ("x",)), *SENT)
    other = (*RECEIVED, Send(value(), link(1, 0), "to"), Wait("to", ()))
    with pytest.raises(PipelineError, match="wait for each other"):
        seconds([crossed, other])


def test_ranks_of_a_group_wait_for_the_slowest():
    late = seconds(
        [SENT, (*RECEIVED, FORWARD, *collective("dp", "sum"))], late=lambda since, _: (since, 0.0)
    )
    assert late.seconds == 1 + 2 + 1 + 2


@pytest.mark.parametrize("part, total", [(1.0, 2.5), (0.75, 2.25), (0.0, 2.0)])
def test_a_collective_behind_a_message_waits_for_what_they_share(part, total):
    """The message goes from 0 to 1, the sum is started at 0.5."""
    receiver = (RECEIVED[0], FORWARD, *collective("dp", "sum"), FORWARD, RECEIVED[1])
    ops, shared = {"a": OpSeconds(0.5, 1.0)}, {"contention": lambda _one, _other: part}
    assert seconds([SENT, receiver], ops, **shared).seconds == pytest.approx(total)
