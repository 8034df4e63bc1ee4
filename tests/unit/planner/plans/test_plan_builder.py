"""Who reads a parameter in the same way reads one copy: plans have it once, as programs do."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.measurement import Measured
from shardwright.planner.recost import recosted
from shardwright.planner.settle import most_shared
from shardwright.planner.strategies.expansion import Expansion
from shardwright.planner.tables.memory import fixed_bytes
from shardwright.program.instructions import Redistribute
from shardwright.program.lower.rank_program import lower
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.rules.placements import tiling_text, tilings
from tests.harness.rotation import rotating

MEASURED = Measured(datetime(2026, 1, 31, tzinfo=UTC), 0.0, ())
TABLE = "table.weight"


class Tied(nn.Module):
    """One table embeds two sequences and makes scores of what becomes of them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)

    def forward(self, first, second):
        given = torch.tanh(self.inner(self.table(first) + self.table(second)))
        scores = nn.functional.linear(given, self.table.weight)
        return nn.functional.cross_entropy(scores.flatten(0, 1), second.flatten())


def graph():
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 8, 4))
    return sw.capture(Tied(), (), {"first": tokens[0], "second": tokens[1]})


def found(measured, **options):
    machine = replace(sw.Machine.preset("2xcpu"), measured=measured)
    given = graph()
    return given, machine, sw.search(given, machine, meshes=[Mesh.parse("dp=2")], **options)


def readers(given):
    return [op.name for op in given.consumers[TABLE]]


def named(frontier, name):
    return next(plan for plan in frontier.baselines if plan.name == name)


def movers(plan):
    """The operators for which the table is moved, or its gradient."""
    return {t.consumer for t in plan.transfers if t.value == TABLE}


def spent_on_table(plan):
    return sum(t.seconds for t in plan.transfers if t.value == TABLE)


def retiled(plan, tilings):
    ops = (replace(op, tiling=tilings.get(op.name, op.tiling)) for op in plan.ops)
    return replace(plan, ops=tuple(ops))


def total(plan):
    parts = (plan.ops, plan.transfers, plan.parameters)
    return sum(one.seconds for part in parts for one in part)


def test_three_readers_of_one_table_sum_its_gradient_once():
    _, _, frontier = found(MEASURED)
    for name in ("data parallel", "ZeRO-2", "fully sharded"):
        assert movers(named(frontier, name)) == {"embedding"}


def test_micro_batches_sum_it_once_too():
    _, _, frontier = found(MEASURED, micro_batches=[2])
    assert movers(named(frontier, "data parallel")) == {"embedding"}


def test_stages_have_copies_of_their_own():
    machine, given = replace(sw.Machine.preset("4xcpu"), measured=MEASURED), graph()
    frontier = sw.search(given, machine, stages=[2], micro_batches=[2])
    assert movers(named(frontier, "even pipeline")) == set(readers(given))


def test_plans_move_a_table_as_often_as_programs_do():
    """Under tilings of its readers, every set of them, wherever it is stored."""
    given, machine, frontier = found(MEASURED)
    analysis, often = analyze(given), Counter()
    mesh = Mesh.parse("dp=2")
    choices = [
        [tiling_text(tiling) for tiling, _ in tilings(analysis.rules[name], mesh)]
        for name in readers(given)
    ]
    every = [
        (start, tuple(zip(readers(given), chosen, strict=True)))
        for start in ("data parallel", "fully sharded")
        for chosen in product(*choices)
    ]

    def kinds(case):
        return [(case[0], frozenset(tiling for _, tiling in case[1])), *case[1]]

    for start, chosen in rotating(every, 4, kinds):
        plan = retiled(named(frontier, start), dict(chosen))
        plan = recosted(plan, given, machine, plan.optimizer, frontier)
        program = lower(given, analysis, read_plan(plan, given, analysis), 0)
        written = [
            one
            for one in program.instructions
            if isinstance(one, Redistribute) and one.result.startswith(f"{TABLE}/")
        ]
        assert len(movers(plan)) == len(written), chosen
        often[len(written)] += 1
    assert {1, 2, 3} <= set(often)


@pytest.mark.parametrize("count", [1, 2])
def test_no_plan_spares_more_than_bounds_leave_room_for(count):
    given, machine, frontier = found(MEASURED, micro_batches=[count])
    _, _, adding = found(None, micro_batches=[count])  # presets take what tables say
    most, spared = most_shared(given, machine, Mesh.parse("dp=2"), count), []
    for name in ("data parallel", "ZeRO-2", "fully sharded"):
        before, after = (named(every, name) for every in (adding, frontier))
        assert movers(before) == set(readers(given))
        spared.append(spent_on_table(before) - spent_on_table(after))
        assert 0 < spared[-1] <= most
        bound = max(0.0, adding.bound(before.peak_bytes) - most)
        assert frontier.bound(before.peak_bytes) == pytest.approx(bound)
    assert max(spared) > most / 2  # so it is no room for anything


def test_nothing_is_shared_where_every_parameter_has_one_reader():
    machine = sw.Machine.preset("2xcpu")
    given = sw.capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(4, 8),))
    assert most_shared(given, machine, Mesh.parse("dp=2"), 4) == 0


@pytest.mark.parametrize("strategy", ["dp_shard=2", "dp_replicate=2", "tp=2"])
def test_lasting_bytes_are_those_of_the_stored_parameters_and_the_batch(strategy):
    given, machine = graph(), sw.Machine.preset("2xH100")
    one = Expansion(given, machine, "adamw").expanded(Strategy.parse(strategy))
    stored = sum(parameter.bytes for parameter in one.plan(0.0, ()).parameters)
    assert one.writer.lasting_bytes(one.point.choice) == fixed_bytes(given) + stored
