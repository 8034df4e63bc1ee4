"""What each pass keeps of a program, alone and behind the passes before it, and what it changes."""

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.host_copies import Fetch, Offload, StoreGradient
from shardwright.program.step.instructions import (
    Accumulate,
    Backward,
    Forward,
    Free,
    Recv,
    Seed,
    Transfer,
    Wait,
    reads,
    writes,
)
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.optimize import PASSES, STEP_PASSES, optimized
from shardwright.program.step.order import check_order
from shardwright.program.step.passes.accumulate import accumulate
from shardwright.program.step.passes.bucket import bucket
from shardwright.program.step.passes.delay_waits import delay_waits
from shardwright.program.step.passes.fetch_parameters import fetch_gathered, fetch_read
from shardwright.program.step.passes.free import free
from shardwright.program.step.passes.fuse import fuse
from shardwright.program.step.passes.late_results import late_results
from shardwright.program.step.passes.overlap_copies import overlap_copies
from shardwright.program.step.passes.overlap_stores import overlap_stores
from shardwright.program.step.passes.overlap_sums import overlap_sums
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.program.step.passes.receive_early import receive_early
from shardwright.rules.analysis import analyze

HOSTED = "offload=optimizer,parameters"
STRATEGIES = (
    *("dp_shard=2", "dp_shard=2 mb=2", "dp_replicate=2", "dp_replicate=2 mb=2", "pp=2 mb=3"),
    *(f"dp_shard=2 {HOSTED}", f"dp_replicate=2 {HOSTED}"),
    "dp_replicate=2 ac=full offload=activations",
)
# Passes that only move instructions.
MOVES = (overlap_sums, prefetch, receive_early, delay_waits, overlap_stores, overlap_copies)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.relu(self.linear(hidden))


class Model(nn.Module):
    """Three equal layers, and a mean over labels that are not ignored."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(x, target)


@cache
def captured():
    graph = sw.capture(Model(), (torch.zeros(96, 8), torch.zeros(96, dtype=torch.long)))
    return graph, analyze(graph)


@cache
def naive(strategy, rank=0):
    graph, analysis = captured()
    decisions = read_plan(sw.price(graph, "2xcpu", strategy), graph, analysis)
    return step_program(graph, analysis, decisions, rank, ())


def known(strategy):
    """All passes that a step of the strategy has."""
    return PASSES if strategy.startswith("pp") else STEP_PASSES


def pair(one, strategy, before):
    """The program before and after a pass."""
    start = optimized(naive(strategy), before)
    return start, optimized(naive(strategy), (*before, one))


def until(one, strategy):
    """The passes before one."""
    passes = known(strategy)
    return passes[: passes.index(one)]


def cases():
    for one in STEP_PASSES:
        for strategy in STRATEGIES:
            if one in known(strategy):
                yield one, strategy


def parts(program):
    return Counter(
        (one.collective, one.channel, part) for one in program.transfers() for part in one.parts
    )


def original(name, copies):
    return copies.get(name, name)


def of_device(program):
    """A program with parameters read where they are stored, without their copies."""
    leaves = set(program.leaves)
    fetched = {one.handle: one for one in program.host_copies() if isinstance(one, Fetch)}
    fetched = {handle: one for handle, one in fetched.items() if one.value in leaves}
    copies = {one.result: one.value for one in fetched.values()}

    def renamed(one):
        match one:
            case Forward():
                return replace(one, inputs=tuple(original(name, copies) for name in one.inputs))
            case Backward():
                pairs = tuple((at, original(name, copies)) for at, name in one.copies)
                return replace(one, copies=pairs)
            case Transfer():
                moved = (replace(p, value=original(p.value, copies)) for p in one.parts)
                return replace(one, parts=tuple(moved))
        return one

    return [
        renamed(one)
        for one in program.instructions
        if getattr(one, "handle", None) not in fetched and not isinstance(one, Free)
    ]


@pytest.mark.parametrize("one, strategy", list(cases()))
def test_a_pass_keeps_what_runs_and_what_is_sent(one, strategy):
    for before in ((), until(one, strategy)):
        start, found = pair(one, strategy, before)
        assert found.returned == start.returned
        ran, runs = (
            [op for each in program.instructions if isinstance(each, Forward) for op in each.ops]
            for program in (start, found)
        )
        assert runs == ran
        if one in MOVES:
            assert Counter(found.instructions) == Counter(start.instructions)
        elif one in (fetch_read, fetch_gathered):
            assert of_device(found) == of_device(start)
        elif one is not fuse:  # which renames gradients that several regions make
            assert parts(found) == parts(start)
        assert len(list(found.transfers())) <= len(list(start.transfers()))


@pytest.mark.parametrize("one", STEP_PASSES)
def test_programs_of_all_ranks_fit_together_after_any_one_pass(one):
    for strategy in STRATEGIES:
        if one in known(strategy):
            check_order([optimized(naive(strategy, rank), (one,)) for rank in range(2)])


def place(program, kind, number=0):
    return [at for at, one in enumerate(program.instructions) if isinstance(one, kind)][number]


def test_a_scalar_sum_is_waited_for_by_its_first_reader():
    _, found = pair(overlap_sums, "dp_shard=2", ())
    instructions = found.instructions
    (result,) = next(found.transfers()).parts
    assert result.shape == ()
    wait = next(at for at, one in enumerate(instructions) if result.result in writes(one))
    assert result.result in reads(instructions[wait + 1])
    assert any(isinstance(one, Forward) for one in instructions[1:wait])


@pytest.mark.parametrize(
    "strategy, collective", [("dp_shard=2", "all_gather"), ("dp_replicate=2", "all_reduce")]
)
def test_small_tensors_of_a_purpose_share_a_transfer(strategy, collective):
    start, found = pair(bucket, strategy, ())
    purpose = Purpose.COPY if collective == "all_gather" else Purpose.GRADIENT
    counts = [
        [
            len(one.parts)
            for one in program.transfers()
            if purposes(program)[one.handle] is purpose and one.collective.value == collective
        ]
        for program in (start, found)
    ]
    assert set(counts[0]) == {1}
    assert max(counts[1]) == 6, "three weights and three biases"
    assert len(counts[1]) < len(counts[0])


def test_regions_that_nothing_separates_are_one():
    start, found = pair(fuse, "dp_replicate=2", (bucket,))
    runs = [
        sum(isinstance(one, Forward) for one in program.instructions) for program in (start, found)
    ]
    assert runs[1] < runs[0]
    assert len(found.regions) < len(start.regions)
    backward = place(found, Backward, -1)
    assert len([name for name in found.instructions[backward].made if name]) == 6


def test_results_are_summed_with_gradients_and_returned_at_the_end():
    start, found = pair(late_results, "dp_replicate=2", until(late_results, "dp_replicate=2"))
    (value,) = found.outputs
    assert value in start.instructions[place(start, Seed)].results
    assert found.instructions[place(found, Seed)].results == ()
    (sums,) = [one for one in found.transfers() if any(p.result == value for p in one.parts)]
    assert purposes(found)[sums.handle] is Purpose.GRADIENT
    assert len(list(start.transfers())) == len(list(found.transfers())) + 1


def test_gradients_that_a_backward_pass_makes_are_added_by_it():
    for strategy in ("dp_replicate=2 mb=2", "pp=2 mb=3"):
        start, found = pair(accumulate, strategy, until(accumulate, strategy))
        made = {
            name for one in start.instructions if isinstance(one, Backward) for name in one.made
        }
        added = [
            one for one in start.instructions if isinstance(one, Accumulate) and one.value in made
        ]
        assert added
        left = {one for one in found.instructions if isinstance(one, Accumulate)}
        assert left.isdisjoint(added)
        totals = [
            total
            for one in found.instructions
            if isinstance(one, Backward)
            for _, total in one.totals
        ]
        assert Counter(totals) == Counter(one.total for one in added)


@pytest.mark.parametrize("ahead", [1, 2])
def test_gathers_start_buckets_ahead_but_not_before_the_seed(ahead):
    start = replace(naive("dp_shard=2"), ahead=ahead)
    found = optimized(start, (prefetch,))
    kinds = purposes(found)
    seed, in_flight, most = place(found, Seed), set(), 0
    for at, one in enumerate(found.instructions):
        if isinstance(one, Transfer) and kinds[one.handle] is Purpose.COPY:
            in_flight.add(one.handle)
        elif isinstance(one, Wait):
            in_flight.discard(one.handle)
        elif isinstance(one, Forward | Backward):
            most = max(most, len(in_flight))
        assert at != seed or not in_flight
    assert most == ahead


def test_the_next_message_is_received_while_a_pass_runs():
    start, found = pair(receive_early, "pp=2 mb=3", ())
    for program, early in ((start, 0), (found, 2)):
        messages = [one.handle for one in program.instructions if isinstance(one, Recv)]
        places = {
            one.handle: at for at, one in enumerate(program.instructions) if isinstance(one, Recv)
        }
        waits = [
            at
            for at, one in enumerate(program.instructions)
            if isinstance(one, Wait) and one.handle in places
        ]
        assert len(messages) == 3
        following = [places[handle] for handle in messages[1:]]
        assert sum(at == wait + 1 for at, wait in zip(following, waits, strict=False)) == early


def test_sums_are_waited_for_behind_all_backward_passes():
    start, found = pair(delay_waits, "dp_replicate=2", (overlap_sums,))
    for program, late in ((start, 0), (found, 6)):  # three weights and biases
        kinds = purposes(program)
        behind = program.instructions[place(program, Backward, -1) :]
        if program is start:  # the last pass makes two gradients, which nothing can hide
            behind = [one for one in behind if "layers.0" not in str(one)]
        waits = [one for one in behind if isinstance(one, Wait)]
        assert len(waits) == late
        assert all(kinds[one.handle] is Purpose.GRADIENT for one in waits)


@pytest.mark.parametrize(
    "one, strategy", [(fetch_read, "dp_replicate=2"), (fetch_gathered, "dp_shard=2")]
)
def test_nothing_reads_parameters_on_the_host_but_copies(one, strategy):
    strategy += f" {HOSTED}"
    start, found = pair(one, strategy, until(one, strategy))
    leaves = set(found.leaves)
    readers = Forward | Backward if one is fetch_read else Transfer
    for program, copied in ((start, False), (found, True)):
        read = {
            name
            for each in program.instructions
            if isinstance(each, readers)
            for name in reads(each)
        }
        assert read.isdisjoint(leaves) is copied


def test_a_gradient_leaves_while_the_next_one_is_computed():
    strategy = f"dp_replicate=2 {HOSTED}"
    start, found = pair(overlap_stores, strategy, (overlap_sums,))
    for program, hidden in ((start, False), (found, True)):
        stores = {
            one.handle: at
            for at, one in enumerate(program.instructions)
            if isinstance(one, StoreGradient)
        }
        waits = {
            one.handle: at for at, one in enumerate(program.instructions) if isinstance(one, Wait)
        }
        runs = [at for at, one in enumerate(program.instructions) if isinstance(one, Backward)]
        busy = [any(at < run < waits[handle] for run in runs) for handle, at in stores.items()]
        assert any(busy) is hidden


def test_copies_to_the_host_and_back_have_an_operator_beside_them():
    strategy = "dp_replicate=2 ac=full offload=activations"
    start, found = pair(overlap_copies, strategy, until(overlap_copies, strategy))
    for program, hidden in ((start, False), (found, True)):
        waits = {
            one.handle: at for at, one in enumerate(program.instructions) if isinstance(one, Wait)
        }
        for at, one in enumerate(program.instructions):
            if one in tuple(program.host_copies()):
                between = program.instructions[at : waits[one.handle]]
                assert any(isinstance(other, Forward | Backward) for other in between) is hidden
                if isinstance(one, Offload) and hidden:
                    behind = program.instructions[waits[one.handle] :]
                    assert all(one.value not in reads(other) for other in behind)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_but_parameters_and_what_is_returned_is_freed_behind_its_last_reader(strategy):
    start, found = pair(free, strategy, until(free, strategy))
    assert [one for one in found.instructions if not isinstance(one, Free)] == list(
        start.instructions
    )
    kept = {*found.leaves, *found.returned}
    last = {}
    for one in start.instructions:
        last |= dict.fromkeys((*reads(one), *writes(one)), one)
    freed = Counter()
    behind = None
    for one in found.instructions:
        if isinstance(one, Free):
            freed.update(one.names)
            assert all(last[name] == behind for name in one.names)
        behind = one
    assert freed == Counter(dict.fromkeys(set(last) - kept, 1))
