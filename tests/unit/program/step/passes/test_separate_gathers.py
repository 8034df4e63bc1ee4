"""Channels of gathers beside reductions: where they are, and that all ranks keep one order."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.graph import VerifyError
from shardwright.ir.plan import PlanError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.plans.simulated.refinement import Refinement
from shardwright.planner.strategies.expansion import Expansion
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Transfer, Wait
from shardwright.program.step.lower.purposes import Purpose, purposes
from shardwright.program.step.lower.rank_steps import step_program
from shardwright.program.step.order import check_order
from shardwright.report.diff.difference import difference
from shardwright.report.headline import headline
from shardwright.rules.analysis import analyze
from shardwright.tracing.op_memory.footprints import Footprints

WIDTH = 512  # a weight fills a bucket
SHARDED = ("dp_shard=2", "dp_shard=2 mb=2", "dp_shard=2 offload=optimizer,parameters")
OTHERS = ("dp_replicate=2", "dp_shard=2 zero=2", "pp=2 mb=3")


def layers(width=WIDTH):
    """Five layers, each with a residual connection, so that stages can be cut between them."""
    return Chain(nn.ModuleList([nn.Linear(width, width) for _ in range(5)]))


class Chain(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x, target):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return nn.functional.cross_entropy(x, target)


@cache
def captured():
    batch = torch.zeros(48, WIDTH), torch.zeros(48, dtype=torch.long)
    graph = sw.capture(layers(), batch)
    return graph, analyze(graph)


@cache
def priced(strategy):
    return sw.price(captured()[0], "2xcpu", strategy)


def program(strategy, rank=0, *, separates=True):
    plan = replace(priced(strategy), separates_gathers=separates)
    return step_program(*captured(), read_plan(plan, *captured()), rank)


@pytest.mark.parametrize("strategy", SHARDED)
def test_copies_of_parameters_have_a_channel_and_nothing_else_changes(strategy):
    plain, apart = (program(strategy, separates=on) for on in (False, True))
    known, moved = purposes(plain), 0
    for one, other in zip(plain.instructions, apart.instructions, strict=True):
        if one != other:
            assert other == replace(one, channel=f"{one.channel}:gathers")
            assert str(other).endswith(" on dp_shard:gathers")
            moved += 1
    gathers = [one for one in plain.transfers() if one.collective.value == "all_gather"]
    assert moved == len(gathers) > 2
    if "offload" not in strategy:  # what is gathered there are copies from the host
        assert moved == sum(known[one.handle] is Purpose.COPY for one in gathers)


@pytest.mark.parametrize("strategy", OTHERS)
def test_there_is_one_channel_where_no_gather_would_wait(strategy):
    plain, apart = (program(strategy, separates=on) for on in (False, True))
    assert plain.instructions == apart.instructions


def test_ranks_that_name_other_channels_do_not_fit_together():
    first, second = program("dp_shard=2"), program("dp_shard=2", 1)
    check_order([first, second])
    with pytest.raises(VerifyError):
        check_order([first, program("dp_shard=2", 1, separates=False)])
    one = next(one for one in second.transfers() if one.channel == "dp_shard:gathers")
    swapped = [replace(x, channel="dp_shard") if x == one else x for x in second.instructions]
    with pytest.raises(VerifyError):
        check_order([first, replace(second, instructions=tuple(swapped))])


def test_two_communicators_are_used_in_one_order_on_all_ranks():
    """Each communicator alone would see its collectives in order."""
    first, second = program("dp_shard=2"), program("dp_shard=2", 1)
    order = [i for i, one in enumerate(second.instructions) if isinstance(one, Transfer)]
    found = 0
    for a, b in pairwise(order):
        changed = list(second.instructions)
        between = changed[a + 1 : b]
        if changed[a].channel == changed[b].channel or any(
            isinstance(one, Wait) and one.handle == changed[a].handle for one in between
        ):
            continue
        changed[a], changed[b] = changed[b], changed[a]
        with pytest.raises(VerifyError, match=r"several communicators in another order.* on dp_"):
            check_order([first, replace(second, instructions=tuple(changed))])
        found += 1
    assert found


def test_a_plan_file_says_so_and_nothing_else_of_the_plan_changes():
    plain = priced("dp_shard=2")
    plan = replace(plain, separates_gathers=True)
    assert "separates_gathers" not in plan_to_json(plain)
    read = plan_from_json(plan_to_json(plan))
    assert replace(read, separates_gathers=False) == plan_from_json(plan_to_json(plain)) != read
    assert "gathers beside reductions on a communicator of their own" in headline(plan)
    (setting,) = difference(plain, plan).settings
    assert setting == ("gathers on their own communicator", "off", "on")


@pytest.mark.parametrize("strategy", [*SHARDED[:2], "pp=2 dp_shard=2 mb=2 reshard=on"])
def test_simulated_time_and_memory_are_those_without(strategy):
    """Both channels of an axis are one link in the simulation."""
    graph, analysis = captured()
    machine = sw.Machine.preset("2x2xH100" if "pp" in strategy else "2xH100")
    expansion = Expansion(graph, machine, "adamw")
    plan = expansion.expanded(Strategy.parse(strategy)).plan(0.0, ())
    found = []
    for separates in (False, True):
        refinement = Refinement(graph, machine, "adamw", Footprints(on_cpu=False), analysis)
        settled = refinement.settled(replace(plan, separates_gathers=separates))
        found.append((settled.step_seconds, settled.peak_bytes))
    assert found[0] == found[1]
    decisions = read_plan(replace(plan, separates_gathers=True), graph, analysis)
    channels = {one.channel for one in step_program(graph, analysis, decisions, 0).transfers()}
    assert "dp_shard:gathers" in channels


def test_asynchronous_pipelines_refuse_it():
    graph, _ = captured()
    frontier = sw.search(graph, "2xcpu", stages=(2,), allow_async=True, micro_batches=(1,))
    plan = next(plan for plan in frontier.plans if plan.is_asynchronous)
    with pytest.raises(PlanError, match="take its separates_gathers out"):
        read_plan(replace(plan, separates_gathers=True), *captured())
