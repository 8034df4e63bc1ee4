"""Strategies become plans: fields that change them or are refused, bounds, and the enumeration."""

import json
import math
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

import shardwright as sw
from shardwright.ir.layout import Bytes
from shardwright.ir.strategy.recompute import NONE, Recompute, StrategyError
from shardwright.ir.strategy.strategy import Strategy
from shardwright.machine.presets import preset
from shardwright.plan_io.plan_text import plan_from_json, plan_to_json
from shardwright.planner.strategies import replicas
from shardwright.planner.strategies.expansion import Expansion, SpaceOfStrategy
from shardwright.planner.strategies.form import form_of
from shardwright.planner.strategies.frontier.bounds import Bounds
from shardwright.planner.strategies.frontier.enumeration import strategies_on
from shardwright.planner.strategies.frontier.priced_frontier import (
    _TRIES,
    RESOLUTION,
    SharedSpaces,
    Until,
    limited,
    priced,
)
from shardwright.planner.strategies.replicas import replica_of
from shardwright.report.text.axis_table import axis_rows
from tests.harness.small_graphs import mixtral

BASE = "dp_shard=2 tp=2 mb=2"
STAGED = "pp=2 dp_shard=2 mb=4"
RING = "cp=2 dp_shard=2 mb=2"
# Of each field: a strategy of four devices, and the value that changes its plan or is refused.
CHANGES = {
    "dp_replicate": (BASE, {"dp_replicate": 2, "dp_shard": 1}),
    "dp_shard": (BASE, {"dp_shard": 4, "tp": 1}),
    "cp": (BASE, {"cp": 2, "tp": 1}),
    "tp": (BASE, {"tp": 1, "dp_shard": 4}),
    "pp": (BASE, {"pp": 2, "tp": 1}),
    "ep": (BASE, {"ep": 2}),
    "etp": (BASE, {"etp": 1}),
    "order": (BASE, {"order": ("pp", "tp", "dp_replicate", "dp_shard", "cp")}),
    "zero": (BASE, {"zero": 1}),
    "reshard_after_forward": (BASE, {"reshard_after_forward": False}),
    "sequence_parallel": (BASE, {"sequence_parallel": False}),
    "async_tp": ("tp=2 dp_shard=2 mb=2", {"async_tp": True}),
    "ep_overlap": ("dp_shard=4 ep=4 mb=2", {"ep_overlap": True}),
    "cp_style": (RING, {"cp_style": "ulysses"}),
    "schedule": (STAGED, {"schedule": "GPipe"}),
    "virtual_stages": (STAGED, {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "micro_batches": (BASE, {"micro_batches": 4}),
    "stage_cut": (STAGED, {"stage_cut": (1, 4)}),
    "recompute": (BASE, {"recompute": Recompute("every", 2)}),
    "offload": (BASE, {"offload": ("optimizer",)}),
    "param_dtype": (BASE, {"param_dtype": "bfloat16"}),
    "reduce_dtype": (BASE, {"reduce_dtype": "bfloat16"}),
    "grad_dtype": (BASE, {"grad_dtype": "bfloat16"}),
    "state_dtype": (BASE, {"state_dtype": "bfloat16"}),
    "fp8": (BASE, {"fp8": "rowwise"}),
    "fp8_gather": ("dp_shard=4 fp8=delayed", {"fp8_gather": True}),
    "compile": (BASE, {"compile": "regional"}),
    "loss": (BASE, {"loss": "chunked(8)"}),
    "mlp": (BASE, {"mlp": "chunked(8)"}),
    "gradient_sync": (BASE, {"gradient_sync": "last"}),
}


@pytest.fixture(scope="module")
def graph():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, max_position_embeddings=32, num_hidden_layers=5, hidden_size=32,
        intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros((16, 16), dtype=torch.long)
    return sw.capture(model, (), {"input_ids": ids, "labels": ids})


@pytest.fixture(scope="module")
def expansion(graph):
    return Expansion(graph, preset("2x2xH100"), "adamw")


@pytest.fixture(scope="module")
def mixture():
    return Expansion(mixtral(layers=3), preset("2x2xH100"), "adamw")


def simulated(expansion, strategy):
    return sw.price(expansion.graph, expansion.machine, strategy).step_seconds


def cost(expansion, strategy):
    if strategy.fp8_gather or strategy.fp8 == "delayed":  # graphs of their own
        graph = form_of(expansion.graph, strategy)
        expansion = Expansion(graph, expansion.machine, expansion.optimizer)
    return expansion.expanded(strategy).cost


@pytest.mark.parametrize("name", [field.name for field in fields(Strategy)])
def test_every_field_changes_the_price_or_is_refused_by_name(expansion, mixture, name):
    expansion = mixture if name in ("ep", "etp", "ep_overlap") else expansion
    unknown = "async_tp", "ep_overlap", "offload"  # to tables
    price = simulated if name in unknown else cost
    text, change = CHANGES[name]
    plain = Strategy.parse(text)
    changed = plain.but(**change)
    assert getattr(plain, name) != getattr(changed, name)
    try:
        found = price(expansion, changed)
    except StrategyError as e:
        assert name in str(e) and ("not yet priced" in str(e) or "captured" in str(e))
    else:
        assert found != price(expansion, plain)


@pytest.mark.parametrize(
    "text, said",
    [
        ("dp_shard=8", "the machine has 4; use dp_shard=4"),
        ("tp=4", "does not fit 2 key and value heads; use tp=2"),
        ("dp_shard=4 mb=8", "use dp_shard=2"),
        ("pp=2 dp_shard=2 mb=4 cut=1,3", "4 layers and the model has 5"),
        ("dp_shard=4 ep=2", "ep=2 splits experts, and this model has none; use ep=1"),
        ("dp_replicate=4 zero=0 ep=4", "ep=4 with etp=1 takes no whole inner part of"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(expansion, text, said):
    with pytest.raises(StrategyError, match=said):
        expansion.expanded(Strategy.parse(text))


def test_parameters_sharded_along_two_axes_take_another_dimension_along_each(graph):
    plan = sw.price(graph, "2x2xH100", "dp_shard=2 cp=2")
    layouts = {p.name: str(p.layout) for p in plan.parameters}
    matrices = {str(layout) for name, layout in layouts.items() if name.endswith("proj.weight")}
    assert matrices <= {"dp_shard:S(0) cp:S(1)", "dp_shard:S(1) cp:S(0)"}
    assert {layout for name, layout in layouts.items() if name.endswith("norm.weight")} == {
        "dp_shard:S(0) cp:S(0)"
    }


def test_axes_have_the_names_of_their_roles(graph):
    plan = sw.price(graph, "2x2xH100", "dp_shard=2 tp=2")
    assert str(plan.mesh) == "dp_shard=2 tp=2"
    weight = next(p for p in plan.parameters if p.name.endswith("0.mlp.up_proj.weight"))
    assert str(weight.layout) == "dp_shard:S(1) tp:S(0)"
    assert weight.regathered


def test_stages_near_each_other_send_in_a_host_and_replicas_reduce_across(graph, expansion):
    """On two hosts of two devices; the plan is read from its file as it was written."""
    apart = f"{STAGED} order=dp_replicate,dp_shard,pp,cp,tp"
    outside, inside = (sw.price(graph, "2x2xH100", text) for text in (STAGED, apart))
    assert (str(outside.mesh), str(inside.mesh)) == ("pp=2 dp_shard=2", "dp_shard=2 pp=2")
    assert inside.receive_seconds[0] < outside.receive_seconds[0]

    def sharding(plan):
        weights = {one.name for one in plan.parameters}
        return sum(t.seconds for t in plan.transfers if t.value in weights)

    assert sharding(inside) > sharding(outside)
    tracks = {task.track.ranks for task in inside.timeline.tasks}
    assert tracks == {"stage 1, ranks 0, 2", "stage 2, ranks 1, 3"}
    texts = [plan_to_json(plan) for plan in (outside, inside)]
    assert [json.loads(text)["format"] for text in texts] == [1, 2]
    assert [plan_from_json(text) for text in texts] == [outside, inside]
    strategy = Strategy.parse(apart)
    assert Bounds(expansion).seconds(strategy) <= cost(expansion, strategy)[0]
    assert {row.axis: row.link for row in axis_rows(inside)} == {
        "dp_shard": "network", "pp": "nvlink"
    }  # fmt: skip


def test_enumeration_finds_what_brute_force_finds_and_bounds_hold(expansion):
    limits = limited(expansion, tp_across_hosts=False)
    every = list(strategies_on(expansion.machine, limits))
    bounds, costs = Bounds(expansion), []
    for strategy in every:
        try:
            seconds, peak = cost(expansion, strategy)
        except StrategyError as e:  # a pipeline that the cuts of this model do not allow
            assert "stages" in str(e)
            continue
        costs.append(seconds)
        assert bounds.seconds(strategy) <= seconds and bounds.bytes(strategy) <= peak, strategy
        assert bounds.rough_seconds(strategy) <= bounds.quick_seconds(strategy), strategy
    found = priced(expansion, every)
    assert len(found) < len(every)
    assert min(c.point.time for c in found) <= min(costs) * (1 + RESOLUTION)


def eagerly_priced(expansion, every, limits, known):
    """The texts of strategies that are priced if all bounds are computed first, in order."""
    bounds, best = Bounds(expansion), dict.fromkeys((*limits, math.inf), known)
    both = [(bounds.seconds(one), bounds.bytes(one), one) for one in every]
    fitting = [row for row in both if row[1] <= max(limits)] or both
    found, tries = [], Counter()
    for seconds, size, one in sorted(fitting, key=lambda row: row[:2]):
        level = min(limit for limit in best if limit >= size)
        tried = level < max(limits) and tries[level] >= _TRIES
        if tried or best[level] <= seconds * (1 + RESOLUTION):
            continue
        tries[level] += 1
        try:
            price, peak = cost(expansion, one)
        except StrategyError:
            continue
        found.append(str(one))
        for limit in best:
            best[limit] = min(best[limit], price) if peak <= limit else best[limit]
    return found


@pytest.mark.parametrize("parts, known", [((1,), 1), ((1, 2, 4), 1), ((1000,), 1), ((1,), 1.05)])
def test_bounds_that_are_computed_late_choose_the_same_strategies(expansion, parts, known):
    """`parts` divide the largest bound of bytes, and `known` multiplies the best price."""
    every = list(strategies_on(expansion.machine, limited(expansion, tp_across_hosts=False)))
    bounds = Bounds(expansion)
    most, least = max(map(bounds.bytes, every)), min(map(bounds.seconds, every))
    given = [most / part for part in parts], math.inf if known == 1 else known * least
    limits, seconds = given
    until = Until(known=seconds)
    found = priced(expansion, every, limits=limits, until=until, reschedule=False)
    assert [one.name for one in found] == eagerly_priced(expansion, every, *given)


def test_pricing_ends_after_some_strategies_that_are_no_better(graph):
    expansion = Expansion(graph, preset("2x2xH100"), "adamw_loop")  # whose bounds exclude less
    every = list(strategies_on(expansion.machine, limited(expansion, tp_across_hosts=False)))
    limits = [expansion.machine.device.usable_bytes]
    found = priced(expansion, every, limits=limits, reschedule=False)
    gains = [
        not place or one.point.time < min(before.point.time for before in found[:place])
        for place, one in enumerate(found)
    ]
    in_vain = len(gains) - 1 - max(place for place, gain in enumerate(gains) if gain)
    assert in_vain > 1
    fewer = priced(expansion, every, limits=limits, until=Until(patience=1), reschedule=False)
    assert [one.name for one in fewer] == [one.name for one in found[: gains.index(False) + 1]]


def test_experts_are_enumerated_and_their_bounds_hold(mixture):
    limits = limited(mixture, tp_across_hosts=False)
    every = [s for s in strategies_on(mixture.machine, limits) if s.pp == s.micro_batches == 1]
    split = [s for s in every if s.ep > 1]
    assert {s.ep for s in split} == {2, 4} and {s.etp for s in split} == {1}
    bounds = Bounds(mixture)
    by_features = map(
        Strategy.parse, ("tp=4 ep=2 etp=2 zero=0", "dp_shard=4 etp=2", "cp=2 tp=2 etp=4")
    )
    for strategy in (*split, *by_features):
        seconds, peak = cost(mixture, strategy)
        assert bounds.seconds(strategy) <= seconds and bounds.bytes(strategy) <= peak, strategy
        assert bounds.rough_seconds(strategy) <= bounds.quick_seconds(strategy), strategy


def test_bounds_of_one_strategy_do_not_depend_on_those_before(expansion):
    texts = ("dp_shard=2 cp=2", "dp_replicate=2 cp=2", "dp_shard=2 tp=2", "tp=2 pp=2 mb=2")
    texts += ("dp_shard=2 cp=2 reshard=off", "dp_shard=2 cp=2 ac=full", "dp_shard=2 pp=2 mb=2")
    every, shared = [Strategy.parse(text) for text in texts], Bounds(expansion)
    assert [shared.rough_seconds(one) for one in every] == [
        Bounds(expansion).rough_seconds(one) for one in every
    ]


def test_replicas_that_the_operators_alone_exclude_have_no_space(graph, monkeypatch):
    built = []

    def build(_expansion, strategy, kinds):
        built.append(strategy)
        return SpaceOfStrategy(_expansion, strategy, kinds)

    monkeypatch.setattr(replicas, "SpaceOfStrategy", build)
    expansion = Expansion(graph, preset("2x2xH100"), "adamw")
    every = list(strategies_on(expansion.machine, limited(expansion, tp_across_hosts=False)))
    bounds, shared = Bounds(expansion), SharedSpaces(expansion)
    least = min(map(bounds.seconds, every))
    needed = {replica_of(one) for one in every if bounds.rough_seconds(one) <= least}
    built.clear()
    priced(expansion, every, until=Until(known=least), reschedule=False, shared=shared)
    assert {replace(one, recompute=NONE) for one in built} <= {
        replace(one, recompute=NONE) for one in needed
    }
    assert len(built) < len({replace(replica_of(one), recompute=NONE) for one in every})


def test_features_of_experts_are_split_where_ranks_have_one_expert_each(mixture):
    wide = Expansion(mixture.graph, preset("2x4xH100"), "adamw")
    limits = limited(wide, tp_across_hosts=False)
    every = [s for s in strategies_on(wide.machine, limits) if s.pp == s.micro_batches == 1]
    by_features = [s for s in every if s.ep > 1 and s.etp > 1]
    assert {(s.tp, s.ep, s.etp) for s in by_features} == {(2, 4, 2)}
    bounds = Bounds(wide)
    for strategy in by_features:
        seconds, peak = cost(wide, strategy)
        assert bounds.seconds(strategy) <= seconds and bounds.bytes(strategy) <= peak, strategy


def test_ranks_of_tp_have_experts_of_their_own_where_the_batch_is_split_no_further(mixture):
    """They share out the sequence; else all of them would compute the same experts."""
    wide = Expansion(mixture.graph, preset("4x8xH100"), "adamw")
    plan = wide.expanded(Strategy.parse("dp_shard=16 tp=2 ep=4")).plan(0.0, ())  # of 16 samples
    splits = {op.splits for op in plan.ops if "experts" in op.target}
    assert splits == {("batch", "batch to experts", "sequence to experts")}


@pytest.mark.parametrize(
    "text, splits, layout",
    [
        ("dp_shard=4 ep=2", ("batch", "batch to experts"), "dp_shard:S(2) ep:S(0)"),
        (
            "dp_shard=2 tp=2 ep=4",
            ("batch to experts", "sequence to experts"),
            "dp_shard:S(0) tp:S(0)",
        ),
        ("dp_shard=2 tp=2 etp=1", ("batch", "sequence"), "dp_shard:S(2) tp:R"),
        (
            "dp_shard=2 tp=2 ep=2 etp=2",
            ("batch to experts", "features (sum)"),
            "dp_shard:S(0) tp:S(2)",
        ),
        ("tp=4 ep=2 etp=2", ("sequence to experts", "features (sum)"), "tp:S(0) etp:S(2)"),
        ("tp=4 etp=2", ("sequence", "features (sum)"), "tp:R etp:S(2)"),
        ("dp_shard=4 etp=2", ("batch", "features (sum)"), "dp_shard:S(1) etp:S(2)"),
        (
            "dp_shard=2 tp=2 etp=4",
            ("features (sum)",) * 2,
            "dp_shard:S(2) tp:S(2)",
        ),
    ],
)
def test_experts_are_split_over_the_ranks_that_a_strategy_says(mixture, text, splits, layout):
    plan = mixture.expanded(Strategy.parse(text)).plan(0.0, ())
    assert {op.splits for op in plan.ops if "experts" in op.target} == {splits}
    found = {str(p.layout) for p in plan.parameters if p.name.endswith("experts.down_proj")}
    assert found == {layout}


def test_a_bound_counts_matrices_that_are_gathered_a_second_time(graph):
    expansion = Expansion(graph, preset("4xH100"), "adamw")
    bounds, once = Bounds(expansion), Strategy.parse("dp_shard=4").but(reshard_after_forward=False)
    twice = once.but(reshard_after_forward=True)
    assert bounds.seconds(once) < bounds.seconds(twice) <= cost(expansion, twice)[0]


def test_offloaded_values_that_exceed_the_memory_of_the_host_are_told(graph):
    machine = preset("2x2xH100")
    small = replace(machine, device=replace(machine.device, host_memory_bytes=Bytes(1)))
    text = "dp_shard=4 ac=full offload=activations"
    plans = [sw.price(graph, one, text) for one in (small, machine)]
    (note,), none = ([n for n in p.notes if "memory of the host" in n] for p in plans)
    assert note.endswith(f"for each device, of which {small} has 0.0 GiB") and not none


def test_strategies_are_a_frontier_of_plans_named_by_their_text(graph):
    frontier = sw.strategies(graph, "2x2xH100")
    best = frontier.fastest()
    assert sw.price(graph, "2x2xH100", best.name).step_seconds == best.step_seconds


def test_tensor_parallelism_in_micro_batches_has_a_time(graph):
    """Positions are cut along micro-batches, which are no mesh axis, and gathered along tp."""
    plan = sw.price(graph, "2x2xH100", "dp_shard=2 tp=2 mb=2")
    assert 0 < plan.step_seconds < 1
