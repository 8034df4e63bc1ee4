"""Gathers of parameters in a process group of their own: the same numbers, and as many groups."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from tests.harness.ranks import run_ranks
from tests.unit.program.step.passes.test_separate_gathers import layers

pytestmark = pytest.mark.ranks

WIDTH = 400  # a weight fills a bucket
# By number of ranks: strategies, each with its channels along `dp_shard` for gathers.
SUBJECTS = {
    2: {"dp_shard=2": 1, "dp_shard=2 mb=2": 1, "dp_replicate=2": 0, "dp_shard=2 zero=2 mb=2": 0},
    4: {"dp_replicate=2 dp_shard=2": 1, "pp=2 dp_shard=2 mb=2 reshard=on": 1},
}


def subject():
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, WIDTH, dtype=torch.float64, generator=draw)
    batch = {"x": x, "target": torch.randint(WIDTH, (8,), generator=draw)}
    return layers(WIDTH).double(), batch


def programs_of(module):
    program = module._sw_program
    called = getattr(program, "_call_programs", None)
    if called is None:
        return [program.training_step]
    return [one.executor for one in called.values()]


def step(plan):
    """Numbers of two steps, the groups that they had, and the groups of each transfer."""
    model, batch = subject()
    before = dist.distributed_c10d._world.group_count
    module = sw.parallelize(model, plan)
    made = dist.distributed_c10d._world.group_count - before
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        found.append(module.train_step(optimizer, batch).detach().clone())
        found += [p.grad.to_local().clone() for p in module.parameters() if p.grad is not None]
    found += [p.to_local().detach().clone() for p in module.parameters()]
    optimizer.zero_grad()
    assert copy.deepcopy(module)._sw_channels is module._sw_channels
    groups = {}
    for executor in programs_of(module):
        for one in executor.program.transfers():
            name = executor.collectives[one.handle].bucket.group.group_name
            groups.setdefault(one.channel, set()).add(name)
    return found, made, groups


def compared(plans):
    return [[step(plan) for plan in both] for both in plans]


@pytest.mark.parametrize("world", SUBJECTS)
def test_numbers_are_the_same_bit_for_bit_and_groups_those_of_the_program(world):
    model, batch = subject()
    graph = sw.capture(model, (), batch)
    plans = [sw.price(graph, f"{world}xcpu", text, "sgd") for text in SUBJECTS[world]]
    both = [(plan, replace(plan, separates_gathers=True)) for plan in plans]
    for found in run_ranks(world, compared, both):
        for (text, more), (shared, apart) in zip(SUBJECTS[world].items(), found, strict=True):
            assert all(map(torch.equal, shared[0], apart[0])), text
            assert len(shared[0]) == len(apart[0]) > 2
            # `new_group` is called once for each set of ranks along an axis.
            assert apart[1] - shared[1] == more * world // 2, text
            assert [name for name in shared[2] if ":gathers" in name] == []
            channels = [name for name in apart[2] if name.endswith(":gathers")]
            assert len(channels) == more, text
            for channel in channels:
                (gathers,), (others,) = apart[2][channel], apart[2][channel.split(":")[0]]
                assert gathers != others
