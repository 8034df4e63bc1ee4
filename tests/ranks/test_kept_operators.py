"""Searched plans that keep operators of recomputed layers: exact on two ranks, of the memory said.

Their limits are tight: without kept operators whole layers would have to run again. An exact search
also recomputes attention and MLP apart, and the copy before a residual sum, which dropout without a
rate leaves, is kept with its product.
"""

from functools import cache

import pytest

import shardwright as sw
from shardwright.ir.layout import Mesh
from shardwright.program.plan_decoder import read_plan
from shardwright.rules.analysis import analyze
from shardwright.tracing.discovery.discover import capture_with_rules
from tests.harness import models
from tests.harness.peak_memory import predicted
from tests.harness.ranks import run_ranks
from tests.ranks.test_lifetimes import assert_close, counted_on_mesh
from tests.ranks.test_strategies import check, trained

pytestmark = [pytest.mark.ranks, pytest.mark.hf]

MESH = Mesh((("dp", 2),))
MOST = 3  # plans


def subject():
    return models.small_llama(layers=5, hidden=64, heads=4, rows=8, length=32)


def by_parts():
    model, batch = models.gpt2(layers=5, dropout=0.0, hidden=32, heads=2, batch=8, length=32)
    return models.double(models.OwnLoss(model), batch)


@cache
def keeping(made):
    """A graph, and plans that keep operators: from many to few, parameters sharded or not.

    Those of an exact search recompute parts of layers.
    """
    model, batch = made()
    graph, exact = capture_with_rules(model, (), batch).graph, made is by_parts
    machine = sw.Machine.preset("2xcpu")
    found = sw.search(graph, machine, meshes=[MESH], micro_batches=(1,), exact=exact)
    plans = [plan for plan in found.plans if sum(op.kept for op in plan.ops) > 1]
    if exact:
        plans = [plan for plan in plans if max(op.segment for op in plan.ops) > 5]
        assert any(op.kept and op.kind == "clone" for plan in plans for op in plan.ops)
    chosen = {sum(op.kept for op in plan.ops): plan for plan in plans}
    counts = sorted(chosen)
    assert len(counts) >= MOST
    few = [counts[i * (len(counts) - 1) // (MOST - 1)] for i in range(MOST)]
    return graph, {f"{count} kept": chosen[count] for count in few}


@pytest.mark.parametrize("made", [subject, by_parts])
def test_plans_that_keep_operators_equal_one_device(made):
    _, plans = keeping(made)
    check(run_ranks(2, trained, plans, made), plans)


@pytest.mark.parametrize("made", [subject, by_parts])
def test_predicted_memory_of_kept_operators_is_what_two_ranks_take(made):
    graph, plans = keeping(made)
    analysis = analyze(graph)
    cases, expected = {}, {}
    for name, plan in plans.items():
        decisions = cases[made.__name__, name] = read_plan(plan, graph, analysis)
        both = [predicted(graph, analysis, decisions, rank) for rank in range(2)]
        expected[made.__name__, name] = max(both, key=lambda memory: memory.peak)
    assert_close(expected, run_ranks(2, counted_here, cases))


def counted_here(cases):
    return counted_on_mesh(cases, "dp=2", {made.__name__: made for made in (subject, by_parts)})
