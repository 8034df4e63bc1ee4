"""What `explain` prints is read by people, so the whole page is held."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.ir.layout import Mesh
from shardwright.ir.memory import Memory
from shardwright.report.text.explain import explain, gap
from shardwright.report.text.wrapping import WIDTH
from tests.harness import plans

GOLDEN = Path(__file__).parents[3] / "golden" / "explain.txt"


def test_explain_matches_the_golden_page():
    page = explain(plans.transformer()) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text(), "rerun with UPDATE_GOLDEN=1 and read the diff"


def test_lines_fit_the_page():
    assert max(map(len, explain(plans.transformer()).splitlines())) <= WIDTH


def test_equal_neighbours_are_folded_and_different_ones_are_not():
    page = explain(plans.transformer())
    assert "blocks.0-1" in page
    assert "blocks.2" in page
    assert "blocks.1 " not in page


def test_depth_does_not_lengthen_the_page():
    def with_blocks(count):
        repeated = [plans.block(i) for i in range(count)]
        ops, parameters, transfers = (
            tuple(x for block in repeated for x in block[kind]) for kind in range(3)
        )
        return replace(
            plans.transformer(), ops=ops, parameters=parameters, transfers=transfers, notes=()
        )

    short, deep = explain(with_blocks(2)), explain(with_blocks(40))
    assert len(deep.splitlines()) == len(short.splitlines())
    assert "0-39" in deep


@pytest.mark.parametrize(
    "bound_ms, text",
    [
        (100.0, "this is the optimum of this cost model"),
        (80.0, "within 25.00 % of the optimum of this cost model for this memory (80.00 ms)"),
        (0.0, "no lower bound is known"),
    ],
)
def test_the_lower_bound_is_a_distance_from_the_optimum(bound_ms, text):
    assert text in explain(replace(plans.simple(ms=100), lower_bound_seconds=bound_ms * plans.MS))


def test_memory_parts_add_up():
    plan = plans.simple(mib=100)
    assert "= state 1.00 MiB + saved for backward 1.00 MiB + not attributed 98.00 MiB" in explain(
        plan
    )


def test_settled_memory_says_what_it_is_made_of_and_where():
    mib = 2**20
    memory = Memory(mib, 0, 2 * mib, 0, 40 * mib, 7 * mib, 0, rank=3, at="layers.1: gelu, backward")
    text = explain(replace(plans.simple(mib=50), memory=memory))
    assert memory.peak == 50 * mib
    assert "= parameters 1.00 MiB + optimizer state 2.00 MiB + saved for backward 40.00 MiB" in text
    assert "on rank 3, at layers.1: gelu, backward" in text
    assert "gradients 0" not in text


@pytest.mark.parametrize("step_ms, text", [(95, "- overlapped 5.00"), (104, "+ waiting 4.00")])
def test_the_parts_of_the_step_add_up(step_ms, text):
    assert text in explain(replace(plans.simple(ms=100), step_seconds=step_ms * plans.MS))


def two_stages():
    plan = plans.transformer()
    mesh, cut = Mesh((("pp", 2), *plan.mesh.axes)), plan.ops[3].name
    return replace(plan, mesh=mesh, stages=2, schedule="1F1B", micro_batches=2, cuts=(cut,))


def test_the_bound_of_a_pipeline_is_that_of_pipelines_that_were_tried():
    staged, said = two_stages(), "of this cost model for this memory and the pipelines that were"
    half = replace(staged, lower_bound_seconds=staged.step_seconds / 2)
    assert gap(half).startswith(f"within 100.00 % of the optimum {said} tried (")
    exact = replace(staged, lower_bound_seconds=staged.step_seconds)
    assert gap(exact) == f"this is the optimum {said} tried"
    assert "tried" not in gap(replace(plans.simple(ms=100), lower_bound_seconds=80 * plans.MS))


def test_what_waits_on_the_host_is_named():
    plan = plans.transformer()
    ops = tuple(
        replace(op, segment=int(op.source.module.split(".")[1]) + 1)
        if op.source.module.startswith("blocks.")
        else op
        for op in plan.ops
    )
    offload = ("activations", "optimizer", "parameters")
    page = explain(replace(plan, ops=ops, offload=offload, on_device=(2,)))
    assert (
        "  offloaded     inputs of 2 recomputed segments, which begin in blocks.0.up, blocks.2.up\n"
        "  offloaded     the optimizer's state of all parameters\n"
        "  offloaded     all parameters and their gradients, which the host updates\n"
    ) in page
    assert "offloaded" not in explain(replace(plan, ops=ops))


def test_stages_and_notes_are_named():
    page = explain(replace(two_stages(), notes=("pinned: layers.0",)))
    assert "2 stages on 2 groups of" in page and "schedule 1F1B" in page
    assert "pinned: layers.0" in page


def test_micro_batches_are_named_and_what_each_of_them_moves_is_counted():
    plan = plans.transformer()
    again = tuple(replace(t, times=4) for t in plan.transfers)
    page = explain(replace(plan, micro_batches=4, transfers=again))
    assert "  micro-batches 4, one after the other; their gradients add up\n" in page
    first = next(t for t in plan.transfers if t.collectives[0].startswith("all_"))
    assert f"4 x {first.collectives[0]}: " in page
    single, fourfold = (
        [int(line.split()[1]) for line in text.splitlines() if line.startswith("  collectives")]
        for text in (explain(plan), page)
    )
    assert single
    assert fourfold == [4 * count for count in single]
