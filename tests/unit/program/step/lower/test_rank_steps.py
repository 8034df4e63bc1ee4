"""Step programs of every plan that a search gives, whole batches and micro-batches."""

from dataclasses import replace

import pytest

from shardwright.api import search_with as search
from shardwright.ir.graph import VerifyError
from shardwright.ir.layout import Mesh
from shardwright.ir.options.plan_options import PlanOptions
from shardwright.ir.pipeline import Pipeline
from shardwright.ir.plan import PlanError
from shardwright.machine.presets import preset
from shardwright.program.plan_decoder import read_plan
from shardwright.program.step.instructions import Backward, Forward, Transfer
from shardwright.program.step.lower.rank_steps import passes_named, step_program
from shardwright.program.step.order import check_order
from shardwright.rules.analysis import analyze
from tests.harness.layered_graphs import residual_layers

GRAPH = residual_layers(3)
ANALYSIS = analyze(GRAPH)


@pytest.fixture(scope="module")
def plans():
    meshes = [Mesh.parse("dp=4"), Mesh.parse("dp=2 tp=2")]
    options = PlanOptions.of(meshes=meshes, micro_batches=(1, 3))
    found = search(GRAPH, preset("4xH100"), options)
    return [read_plan(plan, GRAPH, ANALYSIS) for plan in (*found, *found.baselines)]


@pytest.mark.parametrize("passes", ["all", "naive", "fuse,bucket"])
def test_programs_of_all_plans_fit_together_and_run_every_operator(plans, passes):
    assert {plan.micro_batches for plan in plans} == {1, 3}
    for decisions in plans:
        programs = [
            step_program(GRAPH, ANALYSIS, decisions, rank, passes_named(passes))
            for rank in range(decisions.mesh.size)
        ]
        check_order(programs)
        first = programs[0].instructions
        runs = [one for one in first if isinstance(one, Forward) and not one.again]
        ran = [op for one in runs for op in one.ops if op]
        assert sorted(ran) == sorted([op.name for op in GRAPH.ops] * decisions.micro_batches)
        assert sum(one.saves for one in first if isinstance(one, Forward)) == sum(
            isinstance(one, Backward) for one in first
        )
        assert len(programs[0].gradients) == len(decisions.storage)


def test_a_collective_that_one_rank_leaves_out_is_found(plans):
    decisions = next(d for d in plans if d.micro_batches > 1)
    programs = [step_program(GRAPH, ANALYSIS, decisions, rank) for rank in range(4)]
    place = next(i for i, one in enumerate(programs[2].instructions) if isinstance(one, Transfer))
    handle = programs[2].instructions[place].handle
    rest = [one for one in programs[2].instructions if getattr(one, "handle", "") != handle]
    programs[2] = replace(programs[2], instructions=tuple(rest))
    with pytest.raises(VerifyError):
        check_order(programs)


def staged(plans, schedule, count=3):
    decisions = next(d for d in plans if d.micro_batches == count and d.mesh.size == 4)
    return replace(decisions, pipeline=Pipeline(("layers.1.left",), schedule, 2))


@pytest.mark.parametrize("schedule, count", [("1F1B", 3), ("async spectrain", 1)])
@pytest.mark.parametrize("passes", ["all", "naive", "fuse,bucket"])
def test_programs_of_all_groups_of_a_pipeline_fit_together(plans, passes, schedule, count):
    decisions = staged(plans, schedule, count)
    programs = [
        step_program(GRAPH, ANALYSIS, decisions, rank, passes_named(passes)) for rank in range(8)
    ]
    check_order(programs)
    with pytest.raises(VerifyError):
        check_order([*programs[:7], programs[3]])
    ran = {
        op for p in programs for one in p.instructions if isinstance(one, Forward) for op in one.ops
    }
    assert {op.name for op in GRAPH.ops} <= ran


def test_ranks_that_are_not_there_are_refused(plans):
    with pytest.raises(PlanError, match="rank 4 is none of the plan's 4 ranks; give 0 to 3"):
        step_program(GRAPH, ANALYSIS, plans[0], 4)
    with pytest.raises(PlanError, match="rank 8 is none of the plan's 8 ranks; give 0 to 7"):
        step_program(GRAPH, ANALYSIS, staged(plans, "1F1B"), 8)
    with pytest.raises(PlanError, match="rank 8 is none of the plan's 8 ranks; give 0 to 7"):
        step_program(GRAPH, ANALYSIS, staged(plans, "async stale", 1), 8)


def test_named_passes_run_in_the_order_of_a_step(plans):
    decisions = next(d for d in plans if d.micro_batches > 1)
    program = step_program(GRAPH, ANALYSIS, decisions, 0, passes_named("free, bucket,overlap_sums"))
    assert program.passes == ("overlap_sums", "bucket", "free")
    assert step_program(GRAPH, ANALYSIS, decisions, 0, passes_named("naive")).passes == ()
    with pytest.raises(PlanError, match=r"^'buckets' is no pass; give all, naive or some of over"):
        passes_named("bucket,buckets")
    with pytest.raises(PlanError, match="never has the pass late_results; it has overlap_sums, "):
        step_program(GRAPH, ANALYSIS, staged(plans, "1F1B"), 0, passes_named("late_results"))
