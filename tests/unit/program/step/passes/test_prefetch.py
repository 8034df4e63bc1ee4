"""When gathers start: along two axes, in stages, and where copies are gathered again."""

from dataclasses import replace
from functools import cache

import pytest

import shardwright as sw
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Forward, Recv, Seed, Transfer, Wait
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.passes.prefetch import prefetch
from shardwright.rules.analysis import analyze
from tests.harness import models

LAYERS = 4


@cache
def program(strategy, rank=0):
    """The program after this pass alone, so that each parameter is a bucket."""
    return prefetch(naive(strategy, rank))


@cache
def naive(strategy, rank=0):
    """The program before all passes."""
    model, batch = models.small_llama(LAYERS, 16, 4, 8, 16)
    graph = sw.capture(model, (), batch)
    analysis = analyze(graph)
    plan = replace(sw.price(graph, "4xH100", strategy, "adamw"), ahead=1)
    return step_program(graph, analysis, read_plan(plan, graph, analysis), rank, ())


def copies(found):
    known = purposes(found)
    return [
        one
        for one in found.instructions
        if isinstance(one, Transfer | Wait) and known.get(one.handle) is Purpose.COPY
    ]


def test_the_second_step_of_a_gather_starts_a_bucket_ahead_and_the_first_two():
    found = program("dp_shard=2 cp=2")
    order = list(found.instructions)
    forward = order[: next(i for i, one in enumerate(order) if isinstance(one, Seed))]
    events = [one for one in copies(found) if one in forward]
    arrived = {name for one in events if isinstance(one, Wait) for name in one.results}
    transfers = [one for one in events if isinstance(one, Transfer)]
    firsts = [one for one in transfers if not any(part.value in arrived for part in one.parts)]
    seconds = [one for one in transfers if one not in firsts]
    assert {one.channel for one in seconds} == {"dp_shard", "cp"}  # of vectors, of matrices
    assert len(firsts) == len(seconds) > LAYERS
    handles = {one.handle for one in seconds}
    waits = [one for one in events if isinstance(one, Wait) and one.handle in handles]
    for number, wait in enumerate(waits):
        reader = next(
            (i for i, one in enumerate(order) if isinstance(one, Forward) and i > order.index(wait))
        )
        started = {id(one) for one in order[:reader]}
        assert {id(one) for one in seconds[: number + 2]} <= started
        assert {id(one) for one in firsts[: number + 3]} <= started
        assert not {id(one) for one in seconds[number + 2 :]} & started
        assert not {id(one) for one in firsts[number + 3 :]} & started


def forward_steps(found):
    """First and second steps of gathers along two axes in the forward part, and all waits there."""
    order = list(found.instructions)
    order = order[: next(i for i, one in enumerate(order) if isinstance(one, Seed))]
    waits = {one.handle: one for one in order if isinstance(one, Wait)}
    gathers = [one for one in copies(found) if one in order and isinstance(one, Transfer)]
    arrived = {name for one in gathers for name in waits[one.handle].results}
    seconds = [one for one in gathers if arrived.intersection(p.value for p in one.parts)]
    return [one for one in gathers if one not in seconds], seconds, waits


def with_shared_first_steps(found):
    """Every two gathers of matrices take their first step together."""
    firsts, _, waits = forward_steps(found)
    matrices = [one for one in firsts if one.channel == "dp_shard"]
    changed = {}
    for one, other in zip(matrices[::2], matrices[1::2], strict=False):
        first, second = waits[one.handle], waits[other.handle]
        changed[id(one)] = replace(one, parts=one.parts + other.parts)
        changed[id(first)] = replace(first, results=first.results + second.results)
        changed[id(other)] = changed[id(second)] = None
    order = (changed.get(id(one), one) for one in found.instructions)
    return replace(found, instructions=tuple(one for one in order if one is not None))


def test_a_first_step_that_buckets_share_starts_while_those_of_the_one_before_are_read():
    found = prefetch(with_shared_first_steps(naive("dp_shard=2 cp=2")))
    firsts, seconds, waits = forward_steps(found)
    made_by = {name: one for one in firsts for name in waits[one.handle].results}
    of_second = [made_by[one.parts[0].value] for one in seconds]
    assert len(firsts) < len(seconds), "several share one"
    order = list(found.instructions)
    earlier = 0
    for number, one in enumerate(seconds):
        wait = order.index(waits[one.handle])
        reader = next(i for i in range(wait, len(order)) if isinstance(order[i], Forward))
        started = {id(one) for one in order[:reader]}
        assert {id(one) for one in seconds[: number + 2]} <= started
        assert not {id(one) for one in seconds[number + 2 :]} & started
        assert {id(one) for one in of_second[: number + 3]} <= started
        earlier += any(id(one) in started for one in of_second[number + 4 :])
        assert not {id(one) for one in of_second[number + 6 :]} & started
    assert earlier, "the next shared step does not wait for the last bucket of the one before"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stage_starts_all_gathers_of_what_it_keeps_before_its_first_micro_batch(rank):
    found = program("pp=2 dp_shard=2 mb=4 zero=1", rank)
    order = list(found.instructions)
    gathers = [one for one in copies(found) if isinstance(one, Transfer)]
    assert len(gathers) > LAYERS
    first = next(i for i, one in enumerate(order) if isinstance(one, Forward | Recv))
    assert order[: len(gathers)] == gathers and len(gathers) <= first


def test_a_stage_that_gathers_again_keeps_one_bucket_ahead():
    found = program("pp=2 dp_shard=2 mb=4 zero=3 reshard=on ac=full")
    in_flight = most = 0
    for one in copies(found):
        in_flight += 1 if isinstance(one, Transfer) else -1
        most = max(most, in_flight)
    assert most <= 2


@pytest.mark.parametrize("strategy", ["dp_shard=4 mb=2", "pp=2 dp_shard=2 mb=4"])
def test_recomputed_layers_read_copies_that_are_gathered_once_unless_resharded(strategy):
    kept, again = (
        sum(isinstance(one, Transfer) for one in copies(program(f"{strategy} {form} ac=full")))
        for form in ("zero=1", "zero=3 reshard=on")
    )
    plain = sum(isinstance(one, Transfer) for one in copies(program(f"{strategy} zero=1")))
    assert kept == plain > LAYERS
    assert again > 2 * kept
