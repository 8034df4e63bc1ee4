from dataclasses import replace

import pytest

from shardwright.ir.layout import Layout, Mesh
from shardwright.report.summary import summary
from tests.harness import plans


@pytest.mark.parametrize(
    "plan, text",
    [
        (plans.simple(), "DDP 2: dp=2 splits batch; parameters replicated"),
        (
            plans.simple(mesh="tp=4", lies="S(1)", weight="S(0)"),
            "TP 4: tp=4 splits features; all parameters sharded",
        ),
        (plans.simple(lies="P"), "TP 2: dp=2 splits features; parameters replicated"),
        (plans.simple(lies="R"), "repeated 2: dp=2 splits nothing; parameters replicated"),
        (plans.simple(mesh="dp=1"), "one device"),
        (replace(plans.simple(mesh="dp=1"), micro_batches=4), "one device · 4 micro-batches"),
        (
            replace(plans.simple(), micro_batches=2),
            "DDP 2 · 2 micro-batches: dp=2 splits batch; parameters replicated",
        ),
        (
            plans.transformer(),
            "FSDP 2 · TP 2 · no reshard after forward: dp=2 splits batch; tp=2 splits features"
            " (66%); embed, up, down sharded",
        ),
    ],
)
def test_each_axis_says_what_it_splits(plan, text):
    assert summary(plan) == text


def test_many_sharded_parameters_are_counted_not_listed():
    mesh = Mesh.parse("dp=2")
    sharded = tuple(
        plans.parameter(f"part{i}.weight", "dp:S(0)", 9 - i, mesh=mesh) for i in range(7)
    )
    whole = (plans.parameter("last.weight", "dp:R", mesh=mesh),)
    plan = replace(plans.simple(), parameters=sharded + whole)
    assert summary(plan).endswith("part0, part1, part2, part3 and 3 more sharded")


def test_axes_of_size_one_are_left_out():
    mesh = Mesh.parse("dp=2 tp=1")
    plan = plans.simple()
    op = replace(
        plan.ops[0],
        tiling=("m", "-"),
        splits=("batch", "-"),
        layout=Layout.parse("dp:S(0) tp:R", mesh),
    )
    parameter = plans.parameter("w", "dp:R tp:R", mesh=mesh)
    assert "tp" not in summary(replace(plan, mesh=mesh, ops=(op,), parameters=(parameter,)))
