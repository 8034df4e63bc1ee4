"""Copies of parameters from the host: when they start, how long they stay, and their prices."""

from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.ir.graph import VerifyError
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.host_copies import Fetch, StoreGradient
from shardwright.program.step.instructions import Backward, Forward, Free, Seed, Transfer, Wait
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.order import check_order
from shardwright.program.step.program_json import program_from_json, program_to_json
from shardwright.program.step.verify import verify
from shardwright.rules.analysis import analyze
from tests.harness.models import MeanSquare

OFFLOAD = " offload=optimizer,parameters"
LAYERS = 6


@pytest.fixture(scope="module")
def graph():
    """Layers of 4 MiB each, of which a bucket has one."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(LAYERS)))
        return sw.capture(MeanSquare(layers), (torch.zeros(8, 1024),))


def programs(graph, text):
    plan, analysis = sw.price(graph, "2xcpu", text + OFFLOAD), analyze(graph)
    decisions = read_plan(plan, graph, analysis)
    return [step_program(graph, analysis, decisions, rank) for rank in range(2)]


def alive(program):
    """The number of copies from the host that are there or arrive after each instruction."""
    started = {one.result for one in program.host_copies() if isinstance(one, Fetch)}
    found, now = [], set[str]()
    for one in program.instructions:
        if isinstance(one, Fetch):
            now.add(one.result)
        elif isinstance(one, Free):
            now -= started.intersection(one.names)
        found.append(len(now))
    return found


@pytest.mark.parametrize("text", ["dp_replicate=2", "dp_shard=2", "dp_replicate=2 mb=2 ac=full"])
def test_at_most_two_buckets_of_parameters_are_on_the_device(graph, text):
    found = programs(graph, text)
    check_order(found)
    for program in found:
        counts = alive(program)
        assert max(counts) <= 6 < 2 * LAYERS, "a weight of 4 MiB fills a bucket, with two biases"
        assert counts[-1] == 0
        read = {name for one in program.instructions for name in getattr(one, "inputs", ())}
        assert read.isdisjoint(leaf for leaf, _ in program.on_host)
    assert program_from_json(program_to_json(found[0])) == found[0]


def test_a_copy_starts_while_the_one_before_it_is_read(graph):
    (program, _) = programs(graph, "dp_replicate=2")
    instructions = program.instructions
    waits = {one.handle: at for at, one in enumerate(instructions) if isinstance(one, Wait)}
    seed = next(at for at, one in enumerate(instructions) if isinstance(one, Seed))
    fetched = [at for at, one in enumerate(instructions) if isinstance(one, Fetch)]
    for start, end in ((0, seed), (seed, len(instructions))):
        mine = [at for at in fetched if start <= at < end]
        ends = [waits[instructions[at].handle] for at in mine]
        assert max(ends) < end, "a call may never go backward"
        for at, wait in zip(mine, ends, strict=True):
            between = instructions[at:wait]
            hidden = any(isinstance(other, Forward | Backward) for other in between)
            assert hidden is (at > min(ends)), "of the first bucket alone nothing hides copies"


def test_gradients_leave_while_the_next_are_computed_and_only_once(graph):
    for text in ("dp_replicate=2", "dp_shard=2 mb=2", "dp_replicate=2 mb=2"):
        (program, _) = programs(graph, text)
        instructions = program.instructions
        waits = {one.handle: at for at, one in enumerate(instructions) if isinstance(one, Wait)}
        stores = [
            (at, one) for at, one in enumerate(instructions) if isinstance(one, StoreGradient)
        ]
        batches = 2 if text == "dp_shard=2 mb=2" else 1  # else summed on the device, then reduced
        assert len(stores) == 2 * LAYERS * batches
        computed = [at for at, one in enumerate(instructions) if isinstance(one, Backward)]
        busy = [any(at < other < waits[one.handle] for other in computed) for at, one in stores]
        assert batches == 1 or sum(busy) >= LAYERS
        reduced = [at for at, one in enumerate(instructions) if isinstance(one, Transfer)]
        assert all(min(reduced) < at for at, _ in stores)


def test_a_missing_copy_is_found(graph):
    (program, _) = programs(graph, "dp_shard=2")
    fetch = next(one for one in program.host_copies() if isinstance(one, Fetch))
    kept = tuple(one for one in program.instructions if one is not fetch)
    with pytest.raises(VerifyError, match=f"{fetch.handle} is not in flight"):
        verify(replace(program, instructions=kept))


def test_steps_take_less_time_where_the_host_is_faster(graph):
    slow = sw.Machine.preset("1xL4").with_(host_bandwidth="5GB/s")
    fast = sw.Machine.preset("1xL4").with_(host_bandwidth="10GB/s")
    one, other = (sw.price(graph, m, "dp_shard=1" + OFFLOAD) for m in (slow, fast))
    assert 0.45 < other.step_seconds / one.step_seconds < 0.6
    assert one.peak_bytes == other.peak_bytes
    fused = sw.price(graph, slow, "dp_shard=1" + OFFLOAD, "adamw_fused")
    moved = (21 - 7) * sum(graph.tensor[name].bytes for name in graph.trained)
    assert one.step_seconds - fused.step_seconds == pytest.approx(moved / 5e9, rel=0.01)
