from dataclasses import replace

import pytest

from shardwright.planner.strategies.recognition import strategy_of
from shardwright.report.headline import headline
from shardwright.report.summary import summary
from shardwright.report.text.explain import explain
from tests.harness import plans

SHARDED = replace(plans.parameter("weight", "dp:S(0) tp:R"), regathered=True)
KEPT = replace(SHARDED, regathered=False)


@pytest.mark.parametrize(
    "axes, splits, parameters, text",
    [
        ("dp=4 tp=2", ("batch", "features (sum)"), (), "DDP 4 · TP 2"),
        ("dp=2 tp=4", ("heads", "batch"), (), "DDP 4 · TP 2"),
        ("dp=2 tp=4", ("batch", "batch"), (), "DDP 8"),
        ("dp=2 tp=2", ("batch", "-"), (), "DDP 2 · repeated 2"),
        ("dp=2 tp=2", ("sequence (ring)", "batch to experts"), (), "EP 2 · CP 2"),
        ("dp=2 tp=2", ("batch", "heads"), (SHARDED,), "FSDP 2 · TP 2"),
        ("dp=2 tp=4", ("batch", "batch"), (SHARDED,), "HSDP 4x2"),
        ("dp=1 tp=1", ("-", "-"), (), "one device"),
    ],
)
def test_a_plan_is_named_by_what_its_axes_do(axes, splits, parameters, text):
    op = replace(plans.op("a", "linear", "a", 1, "m n", "dp:S(0) tp:S(1)"), splits=splits)
    plan = replace(plans.simple(), mesh=plans.Mesh.parse(axes), ops=(op,), parameters=parameters)
    assert headline(plan) == text
    assert summary(plan).startswith(text)


def test_an_axis_of_several_roles_has_the_words_of_all():
    ops = (plans.op("a", "linear", "a", 1, "m n", "dp:S(0) tp:S(1)"),
           plans.op("b", "linear", "b", 1, "n n", "dp:S(1) tp:S(1)"))  # fmt: skip
    plan = replace(plans.simple(), mesh=plans.MESH, ops=ops, parameters=())
    assert headline(plan) == "TP 2 · DP+TP 2"
    sharded = replace(plan, parameters=(SHARDED,), ops=ops)
    assert headline(sharded) == "TP 2 · FSDP+TP 2"
    rare = replace(ops[1], seconds=1.1e-3, splits=("sequence", "features"))
    slow = replace(ops[0], seconds=9e-3)
    other = replace(plan, ops=(slow, rare, replace(ops[1], seconds=0.1e-3)))
    assert headline(other) == "TP 2 · DP+CP 2"


@pytest.mark.parametrize("name, word", [("dp_shard=2 zero=1", "ZeRO-1"), ("dp_shard=2", "FSDP")])
def test_a_strategy_says_what_data_parallelism_shards(name, word):
    plan = plans.simple(weight="S(0)")
    parameters = tuple(replace(one, regathered=True) for one in plan.parameters)
    assert headline(replace(plan, name=name, parameters=parameters)) == f"{word} 2"


@pytest.mark.parametrize(
    "parameters, text",
    [
        ((SHARDED, KEPT), " · reshard 50% of parameters after forward"),
        ((SHARDED, replace(KEPT, bytes=SHARDED.bytes // 99)), ""),
        ((KEPT, KEPT), " · no reshard after forward"),
        ((SHARDED,) * 99 + (KEPT,), ""),
        ((KEPT,) * 99 + (SHARDED,), " · no reshard after forward"),
    ],
)
def test_sharded_parameters_that_stay_gathered_are_named(parameters, text):
    op = replace(
        plans.op("a", "linear", "a", 1, "m n", "dp:S(0) tp:S(1)"), splits=("batch", "heads")
    )
    plan = replace(plans.simple(), mesh=plans.MESH, ops=(op,), parameters=parameters)
    assert headline(plan) == f"FSDP 2 · TP 2{text}"
    named = replace(plan, name="dp_shard=2 tp=2 zero=2")
    assert headline(named) == "ZeRO-2 2 · TP 2"


@pytest.mark.parametrize(
    "again, text",
    [
        ([], ""),
        ([1, 3], " · recompute every 2nd layer"),
        ([0, 1, 2], " · recompute every layer"),
        ([0, 1, 2, 3], " · recompute every layer"),
        ([0, 3], " · recompute 2 of 4 layers"),
    ],
)
def test_recomputed_layers_are_counted(again, text):
    ops = [
        replace(plans.op(f"a{i}{j}", "linear", f"layers.{i}.up", 1, "m -", "dp:S(0) tp:R"),
                segment=int(i in again))
        for i in range(4) for j in range(3)
    ]  # fmt: skip
    plan = replace(plans.simple(), mesh=plans.MESH, ops=tuple(ops), parameters=())
    assert headline(plan) == f"DDP 2 · repeated 2{text}"
    part = replace(ops[0], segment=1), *ops[1:]
    if not again:
        assert headline(replace(plan, ops=part)).endswith("recompute 1 of 12 operators")


def test_operators_that_recomputed_layers_keep_are_named_as_in_a_strategy():
    kinds = ("linear", "scaled_dot_product_attention", "view", "linear", "gelu")
    ops = [
        replace(plans.op(f"{kind}{i}{j}", kind, f"layers.{i}", 1, "m -", "dp:S(0) tp:R"),
                segment=i + 1, kept=0 < j < 3, seconds=0.0 if kind == "view" else 1.0)
        for i in range(3) for j, kind in enumerate(kinds)
    ]  # fmt: skip
    plan = replace(plans.simple(), mesh=plans.MESH, ops=tuple(ops), parameters=())
    assert headline(plan).endswith(" · recompute every layer but for attention")
    assert str(strategy_of(plan).recompute) == "ops(attention)"
    more = replace(ops[0], kept=True), *ops[1:]
    some = replace(plan, ops=more)
    assert headline(some).endswith(" · recompute every layer but for 1 of 6 mm, attention")
    assert str(strategy_of(some).recompute) == "full"
    text = " ".join(explain(some).split())
    assert "8 operators in 3 segments, which keep the results of 1 mm, 3 attention" in text
    assert "kept: mm, attention: " in text


def test_stages_have_their_schedule():
    plan = replace(
        plans.simple(), mesh=plans.Mesh.parse("pp=2 dp=2"), stages=4, schedule="Interleaved1F1B",
        cuts=("a", "b", "c"), micro_batches=16,
    )  # fmt: skip
    assert headline(plan) == "DDP 2 · PP 2 (Interleaved1F1B, 2 stages each, 16 micro-batches)"
