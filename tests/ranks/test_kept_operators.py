"""Searched plans that keep operators of recomputed layers: exact on two ranks, of the memory said.

Their limits are tight: without kept operators whole layers would have to run again.
"""

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


def keeping(graph):
    """Plans that keep operators, from many to few, with and without sharded parameters."""
    found = sw.search(graph, sw.Machine.preset("2xcpu"), meshes=[MESH], micro_batches=(1,))
    plans = [plan for plan in found.plans if sum(op.kept for op in plan.ops) > 1]
    chosen = {sum(op.kept for op in plan.ops): plan for plan in plans}
    counts = sorted(chosen)
    assert len(counts) >= MOST
    few = [counts[i * (len(counts) - 1) // (MOST - 1)] for i in range(MOST)]
    return {f"{count} kept": chosen[count] for count in few}


def test_plans_that_keep_operators_equal_one_device():
    model, batch = subject()
    plans = keeping(sw.capture(model, (), batch))
    check(run_ranks(2, trained, plans, subject), plans)


def test_predicted_memory_of_kept_operators_is_what_two_ranks_take():
    model, batch = subject()
    graph = capture_with_rules(model, (), batch).graph
    analysis = analyze(graph)
    cases, expected = {}, {}
    for name, plan in keeping(graph).items():
        decisions = cases["kept", name] = read_plan(plan, graph, analysis)
        both = [predicted(graph, analysis, decisions, rank) for rank in range(2)]
        expected["kept", name] = max(both, key=lambda memory: memory.peak)
    assert_close(expected, run_ranks(2, counted_here, cases))


def counted_here(cases):
    return counted_on_mesh(cases, "dp=2", {"kept": subject})
