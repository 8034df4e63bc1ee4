from dataclasses import replace

import pytest

from shardwright.ir.layout import Layout, Mesh
from shardwright.report.summary import parallelism, summary
from tests.harness import plans


@pytest.mark.parametrize(
    "plan, text",
    [
        (plans.simple(), "dp=2 splits batch; parameters replicated"),
        (
            plans.simple(mesh="tp=4", lies="S(1)", weight="S(0)"),
            "tp=4 splits features; all parameters sharded",
        ),
        (plans.simple(lies="P"), "dp=2 splits features; parameters replicated"),
        (plans.simple(lies="R"), "dp=2 splits nothing; parameters replicated"),
        (plans.simple(mesh="dp=1"), "one device"),
        (replace(plans.simple(mesh="dp=1"), micro_batches=4), "one device; 4 micro-batches"),
        (
            replace(plans.simple(), micro_batches=2),
            "dp=2 splits batch; 2 micro-batches; parameters replicated",
        ),
        (
            plans.transformer(),
            "dp=2 splits batch; tp=2 splits features (66%); embed, up, down sharded",
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
    op = replace(plan.ops[0], tiling=("m", "-"), layout=Layout.parse("dp:S(0) tp:R", mesh))
    parameter = plans.parameter("w", "dp:R tp:R", mesh=mesh)
    assert "tp" not in summary(replace(plan, mesh=mesh, ops=(op,), parameters=(parameter,)))


def test_stages_are_named():
    assert "4 stages, 1F1B" in summary(replace(plans.simple(), stages=4, schedule="1F1B"))


SHARDED = plans.parameter("weight", "dp:S(0) tp:R")


@pytest.mark.parametrize(
    "axes, splits, parameters, text",
    [
        ("dp=4 tp=2", ("batch", "features (sum)"), (), "4-way data x 2-way tensor parallel"),
        ("dp=2 tp=4", ("heads", "batch"), (), "4-way data x 2-way tensor parallel"),
        ("dp=2 tp=4", ("batch", "batch"), (), "8-way data parallel"),
        ("dp=2 tp=2", ("batch", "-"), (), "2-way data x 2-way repeated parallel"),
        ("dp=2 tp=2", ("sequence (ring)", "batch to experts"), (), "2-way expert x 2-way sequence"),
        ("dp=2 tp=2", ("batch", "heads"), (SHARDED,), "2-way sharded data x 2-way tensor"),
        ("dp=1 tp=1", ("-", "-"), (), "one device"),
    ],
)
def test_the_ways_in_which_a_plan_is_parallel(axes, splits, parameters, text):
    op = replace(plans.op("a", "linear", "a", 1, "m n", "dp:S(0) tp:S(1)"), splits=splits)
    mesh = plans.Mesh.parse(axes)
    plan = replace(plans.simple(), mesh=mesh, ops=(op,), parameters=parameters)
    assert parallelism(plan).startswith(text)


def test_stages_are_a_way_too():
    plan = replace(plans.simple(), stages=4, schedule="1F1B")
    assert parallelism(plan).endswith("a pipeline of 4 stages")
