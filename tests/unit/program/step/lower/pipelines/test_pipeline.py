"""Pipelines as step programs: programs of all ranks fit together, under every schedule."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ir.graph import LeafKind, VerifyError
from shardwright.ir.layout import Mesh
from shardwright.ir.pipeline import Pipeline, groups_of, stage_mesh
from shardwright.ir.redistribution import Collective
from shardwright.ir.schedules.registry import SCHEDULES
from shardwright.ir.schedules.schedule import Kind, Pass, PipelineError, Schedule
from shardwright.program.decisions import Decisions
from shardwright.program.instructions import Move
from shardwright.program.lower.balance import balanced_cuts, operator_work
from shardwright.program.lower.pipeline import StagedGraph
from shardwright.program.step.channels import link
from shardwright.program.step.dead_code import forward_only
from shardwright.program.step.instructions import (
    Backward,
    Gradients,
    Part,
    Payload,
    Recv,
    Send,
    Transfer,
    Wait,
)
from shardwright.program.step.lower.pipelines.messages import steps
from shardwright.program.step.lower.pipelines.pipeline import lower_pipeline
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.optimize import PASSES, optimized
from shardwright.program.step.order import check_order
from shardwright.program.step.passes.bucket import bucket
from shardwright.program.step.passes.receive_early import receive_early
from shardwright.program.step.verify import verify
from shardwright.rules.analysis import analyze
from shardwright.rules.micro_batches import micro_batches
from shardwright.rules.placements import feasible, layouts_under, tilings
from shardwright.tracing.capture import capture_call
from tests.ranks.test_random_tilings import stored_as

SYNCHRONOUS = [name for name, one in SCHEDULES.items() if not one.asynchronous]


class Tied(nn.Module):
    """Layers between an embedding and a product with its weight."""

    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(x @ self.embed.weight.T, labels)


@cache
def subject(size=8):
    """The model of `size` layers for as many samples."""
    torch.manual_seed(0)
    ids = torch.randint(12, (size,))
    graph = capture_call(Tied(size), (), {"ids": ids, "labels": ids}).graph
    return graph, analyze(graph)


def staged(schedule, mesh, stages, count, seed=0, size=8):
    """The model in stages, every operator and parameter in any layout."""
    graph, analysis = subject(size)
    mesh, draw = Mesh.parse(mesh), random.Random(f"{schedule} {mesh} {stages} {count} {seed}")
    inner = stage_mesh(mesh)
    cuts = balanced_cuts(graph, stages, operator_work(graph, analysis))
    micro = micro_batches(graph, analysis, count) if count > 1 else None

    def fits(op, tiling):
        if micro is None:
            return True
        rule = analysis.rules[op.name]
        wide = micro.mesh(inner)
        return feasible(rule, layouts_under(rule, (micro.choices[op.name], *tiling), wide))

    chosen = {
        op.name: draw.choice(
            [one for one, _ in tilings(analysis.rules[op.name], inner) if fits(op, one)]
        )
        for op in graph.ops
    }
    storage = {
        leaf.name: draw.choice(stored_as(analysis.atoms[leaf.name], inner))
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    again = frozenset(key for key in storage if draw.random() < 0.5)
    pipeline = Pipeline(tuple(graph.ops[i].name for i in cuts), schedule, groups_of(mesh))
    decisions = Decisions(inner, chosen, storage, again, {}, count, pipeline)
    return StagedGraph(graph, analysis, decisions)


def programs(one, make=lambda program: program):
    ranks = one.pipeline.groups * one.decisions.mesh.size
    return [make(lower_pipeline(one, rank)) for rank in range(ranks)]


def stages_of(schedule, groups):
    each = SCHEDULES[schedule].stages_per_group
    return groups * (2 if each is None else each)


def cases():
    for schedule in SYNCHRONOUS:
        for mesh, groups in (
            ("pp=2 dp=1", 2),
            ("pp=4 dp=1", 4),
            ("pp=2 dp=2", 2),
            ("dp=2 pp=2", 2),
        ):
            for count in (4, 8):
                stages = stages_of(schedule, groups)
                if count >= stages or not SCHEDULES[schedule].needs(groups, stages, count):
                    yield schedule, mesh, stages, count


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_of_all_ranks_fit_together(case):
    one = staged(*case)
    naive = programs(one)
    check_order(naive)
    passed = [optimized(program) for program in naive]
    check_order(passed)
    evaluated = [forward_only(program) for program in passed]
    for program in evaluated:
        verify(program)
        assert not any(message.backward for message in program.messages())
    check_order(evaluated)
    for some in (PASSES[:2], PASSES[2:4]):
        check_order([optimized(program, some) for program in naive])


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_eight_groups_of_devices_run_sixteen_micro_batches(schedule):
    """Also with receives that are posted early, and without, no rank waits forever."""
    naive = programs(staged(schedule, "pp=8 dp=1", stages_of(schedule, 8), 16, size=16))
    sends = sum(isinstance(one, Send) for program in naive for one in program.instructions)
    assert sends >= 2 * 7 * 16, "each micro-batch goes through all groups and back"
    check_order(naive)
    check_order([optimized(program) for program in naive])


def test_messages_in_two_directions_on_one_channel_wait_for_each_other():
    """Each rank sends before it receives: on one communicator neither message can start."""
    one = staged("1F1B", "pp=2 dp=1", 2, 4)
    empty = [replace(program, instructions=(), outputs=()) for program in programs(one)]
    tile = (Payload("x", (3,), "float32"),)

    def both(sent, received):
        send, receive = Send(tile, sent, "s"), Recv(tile, received, "r")
        return send, receive, Wait("r", ("x",)), Wait("s", ())

    apart = [both(link(0, 1), link(1, 0)), both(link(1, 0), link(0, 1))]
    check_order([replace(p, instructions=i) for p, i in zip(empty, apart, strict=True)])
    together = [replace(p, instructions=both("pp:0,1", "pp:0,1")) for p in empty]
    with pytest.raises(VerifyError, match=r"rank 0 waits forever at: %x = wait r"):
        check_order(together)
    turned = [together[0].instructions, tuple(together[1].instructions[i] for i in (1, 2, 0, 3))]
    check_order([replace(p, instructions=i) for p, i in zip(empty, turned, strict=True)])


@pytest.mark.parametrize("case", [("Interleaved1F1B", "pp=2 dp=1", 4, 4)], ids=str)
def test_a_rank_that_leaves_out_or_swaps_a_message_is_found(case):
    first, *others = programs(staged(*case), optimized)
    places = [i for i, one in enumerate(first.instructions) if isinstance(one, Send | Recv)]
    for at in places:
        handle = first.instructions[at].handle
        rest = [one for one in first.instructions if getattr(one, "handle", "") != handle]
        with pytest.raises(VerifyError):
            check_order([replace(first, instructions=tuple(rest)), *others])
    for at in places:
        one = first.instructions[at]
        wrong = replace(one, payload=(replace(one.payload[0], dtype="int8"), *one.payload[1:]))
        changed = (*first.instructions[:at], wrong, *first.instructions[at + 1 :])
        with pytest.raises(VerifyError, match="do not start the same"):
            check_order([replace(first, instructions=changed), *others])


def test_halves_of_backward_passes_come_in_order():
    one = staged("ZBVZeroBubble", "pp=2 dp=1", 4, 4)
    for rank, program in enumerate(programs(one, optimized)):
        parts = {}
        for backward in program.instructions:
            if isinstance(backward, Backward):
                parts.setdefault(backward.call, []).append(backward.part)
        forms = {tuple(found) for found in parts.values()}
        assert forms <= {(Gradients.ALL,), (Gradients.INPUTS, Gradients.WEIGHTS)}
        # Of the first and the last stage, both on group 0, the parts cannot be computed apart.
        assert ((Gradients.INPUTS, Gradients.WEIGHTS) in forms) == (rank == 1)
        weights = [
            i
            for i, one in enumerate(program.instructions)
            if isinstance(one, Backward) and one.part is Gradients.WEIGHTS
        ]
        for at in weights:
            rest = program.instructions[:at] + program.instructions[at + 1 :]
            with pytest.raises(VerifyError):
                verify(replace(program, instructions=rest))


def test_a_tied_weight_is_summed_over_its_groups_once():
    one = staged("1F1B", "pp=4 dp=1", 4, 4)
    for rank, program in enumerate(programs(one, optimized)):
        shared = [t for t in program.transfers() if t.channel == "pp:0,3"]
        assert [t.parts[0].value.split("/")[1] for t in shared] == ["embed.weight"] * (
            rank in (0, 3)
        )


def test_sums_over_stages_are_in_no_bucket():
    """Stages find other sums ready at a time, and so would make other buckets."""

    def bucketed(channel):
        move = Move(channel, Collective.ALL_REDUCE, (3,), -1, -1, 0, 0, True)
        found = []
        for name in "ab":
            part = Part(name, f"{name}/sum", (3,), (), move, (3,), "float32")
            found.append(Transfer(Collective.ALL_REDUCE, channel, (part,), name))
            found.append(Wait(name, (f"{name}/sum",)))
        empty = programs(staged("1F1B", "pp=2 dp=2", 2, 4))[0]
        program = replace(
            empty,
            inputs=(("a", 0, "a"), ("b", 0, "b")),
            instructions=tuple(found),
            outputs=(),
            gradients=(("a", "a/sum"), ("b", "b/sum")),
        )
        return [len(one.parts) for one in bucket(program).transfers()]

    assert bucketed("dp") == [2]
    assert bucketed("pp") == bucketed("pp:0,1") == [1, 1]


def _sharded():
    """Two stages of two ranks each, all parameters sharded."""
    graph, analysis = subject()
    inner = Mesh.parse("dp=2")
    cuts = balanced_cuts(graph, 2, operator_work(graph, analysis))
    pipeline = Pipeline(tuple(graph.ops[i].name for i in cuts), "1F1B", 2)
    tiled = {
        op.name: next(
            tiling
            for tiling, layouts in tilings(analysis.rules[op.name], inner)
            if not graph.tensor[op.outputs[0]].shape
            or any(str(p) == "S(0)" for p in layouts.results[0].placements)
        )
        for op in graph.ops
    }
    stored = {
        leaf.name: next(
            layout
            for layout in stored_as(analysis.atoms[leaf.name], inner)
            if str(layout.placements[0]) == "S(0)"
        )
        for leaf in graph.leaves_of(LeafKind.PARAMETER)
    }
    return StagedGraph(
        graph, analysis, Decisions(inner, tiled, stored, frozenset(), {}, 4, pipeline)
    )


def test_sharded_stages_gather_in_buckets_and_keep_the_copies():
    for naive in programs(_sharded()):
        copies = _gathered(naive)
        assert all(len(values) == 1 for values in copies)
        assert len(copies) == len({value for (value,) in copies}) >= 7, "once a step, for all"
        found = _gathered(optimized(naive))
        assert len(found) <= 2
        assert sorted(value for values in found for value in values) == sorted(
            value for (value,) in copies
        )


def _gathered(program):
    """The parameters of each gather."""
    kinds = purposes(program)
    return [
        tuple(part.value for part in t.parts)
        for t in program.transfers()
        if kinds[t.handle] is Purpose.COPY
    ]


def test_a_message_is_received_while_the_pass_before_runs():
    naive = programs(staged("1F1B", "pp=2 dp=1", 2, 4))[1]
    program = receive_early(naive)
    words = [one.__class__.__name__ for one in program.instructions]
    at = [i for i, word in enumerate(words) if word == "Recv"]
    assert len(at) == 4
    for here, there in pairwise(at):
        between = program.instructions[here:there]
        assert isinstance(between[-1], Wait)
        assert all(one.handle == between[0].handle for one in between if isinstance(one, Wait))
    assert [m.handle for m in program.messages() if isinstance(m, Recv)] == [
        m.handle for m in naive.messages() if isinstance(m, Recv)
    ]


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("groups, count", [(2, 8), (4, 8), (4, 16)])
def test_waits_for_sent_messages_add_no_dependency(schedule, groups, count):
    """What a group waits for was posted before what it received was sent: positions say so."""
    stages = stages_of(schedule, groups)
    every = steps(schedule, groups, stages, count)
    assert [len(mine) for mine in every] == [len({step.one for step in mine}) for mine in every]
    sent = [step.sent for mine in every for step in mine if step.sent]
    received = [step.received for mine in every for step in mine if step.received]
    posted = [one for mine in every for step in mine for one in step.posts]
    assert sorted(sent) == sorted(received) == sorted(posted)
    known = [one for mine in every for step in mine for one in step.known_sent]
    assert len(known) == len(set(known)) > len(sent) / 4
    if schedule == "1F1B":  # at most one micro-batch more than wait in the stage
        for group, mine in enumerate(every):
            held = most = 0
            for step in mine:
                held -= len([one for one in step.known_sent if not one.backward])
                held += step.sent is not None and not step.sent.backward
                most = max(most, held)
            assert most <= groups - group


def test_a_schedule_that_waits_for_itself_is_refused(monkeypatch):
    def backward_first(group, _groups, _stages, _count):
        yield Pass(group, 0, Kind.FORWARD if group else Kind.BACKWARD)
        yield Pass(group, 0, Kind.BACKWARD if group else Kind.FORWARD)

    monkeypatch.setitem(SCHEDULES, "backwards", Schedule("backwards", backward_first))
    with pytest.raises(PipelineError, match="waits for itself: group 0 cannot start the backward"):
        steps("backwards", 2, 2, 1)


@pytest.mark.parametrize(
    "places, said",
    [((3, 3), "must increase"), ((2, 0), "must increase"), ((None,), "is before no operator of")],
)
def test_cuts_that_make_no_stages_are_refused(places, said):
    graph, analysis = subject()
    cuts = tuple("nothing" if i is None else graph.ops[i].name for i in places)
    pipeline = Pipeline(cuts, "GPipe", len(cuts) + 1)
    decisions = Decisions(Mesh.parse("dp=1"), {}, {}, frozenset(), {}, 4, pipeline)
    with pytest.raises(PipelineError, match=said):
        StagedGraph(graph, analysis, decisions)
