"""What each word of recomputation runs again, and what plans of it cost."""

import pytest

import shardwright as sw
from shardwright.ir.strategy.recompute import Recompute, StrategyError
from shardwright.planner.space.repeats import find_repeats
from shardwright.planner.strategies.layers import layers_of
from shardwright.planner.strategies.recomputation import recomputable_by, recomputed
from shardwright.rules.operators.mlp_chunks import with_mlp_chunks
from tests.harness.models import gpt2, small_llama
from tests.harness.torch_composition import LAYERS, subject


@pytest.fixture(scope="module")
def graph():
    model, ids = subject()
    return sw.capture(model, (), {"ids": ids})


def kinds(graph, word):
    """Kinds of the operators of each segment that runs again, and of those that run once."""
    layers = layers_of(graph, tuple(find_repeats(graph)))
    recompute = Recompute.parse(word)
    possible = recomputable_by(recompute, graph, layers)
    spans = recomputed(recompute, graph, layers, possible)
    again = [[graph.ops[i].kind for i in span] for span in spans]
    return again, [graph.op[name].kind for name in sorted(possible.skeleton.kept)]


def test_children_and_modules_are_runs_of_their_operators(graph):
    children, _ = kinds(graph, "children")
    assert children[:3] == [["layer_norm"], ["linear"], ["linear"]]  # gelu is the layer's own
    assert len(children) == 3 * LAYERS
    modules, _ = kinds(graph, "modules(layers.1.*,up)")
    assert modules.count(["linear"]) == LAYERS + 1 and modules.count(["layer_norm"]) == 1
    assert kinds(graph, "modules(layernorm)")[0] == [["layer_norm"]] * LAYERS


def test_groups_join_layers_and_the_last_one_has_what_is_left(graph):
    layers, groups = kinds(graph, "full")[0], kinds(graph, "groups(3)")[0]
    assert len(groups) == 2 and len(groups[0]) == 3 * len(layers[0])


def test_of_every_second_product_the_first_is_kept(graph):
    again, kept = kinds(graph, "ops(mm/2,gelu)")
    assert len(again) == LAYERS and sorted(kept) == ["gelu"] * LAYERS + ["linear"] * LAYERS
    plan = sw.price(graph, "2xcpu", "dp_shard=2 ac=ops(mm/2,gelu)", "sgd")
    chosen = {op.source.module.rpartition(".")[2] for op in plan.ops if op.kept}
    assert "up" in chosen and "down" not in chosen
    assert sw.Plan.from_json(plan.to_json()) == plan


def test_memory_and_time_lie_between_all_and_nothing_recomputed(graph):
    words = ("full", "ops(mm)", "none")
    machine = sw.Machine.preset("2xH100").with_(overlap=0.0)  # gathers one bucket ahead
    plans = [sw.price(graph, machine, f"dp_shard=2 ac={word}", "sgd") for word in words]
    saved = [plan.memory.saved for plan in plans]
    seconds = [plan.step_seconds for plan in plans]
    assert saved[0] < saved[1] < saved[2] and seconds[0] > seconds[1] > seconds[2]


def test_a_kept_attention_saves_its_result_but_not_what_its_layer_computes_again():
    """Query, key and value were counted, too: three results more."""
    layers, rows, length, hidden, heads = 5, 64, 32, 32, 4
    model, batch = small_llama(layers, hidden, heads, rows, length)
    llama = sw.capture(model, (), batch)
    words = ("full", "ops(attention)")
    peaks = [sw.price(llama, "1xH100", f"ac={word}", "sgd").peak_bytes for word in words]
    result, row_sums = 8 * rows * length * hidden, 4 * rows * heads * length
    assert 0 < peaks[1] - peaks[0] <= layers * (result + row_sums)


def test_a_budget_recomputes_as_few_layers_as_it_needs(graph):
    counts = [len(kinds(graph, f"budget({part})")[0]) for part in (0.9, 0.6)]
    assert 0 < counts[0] < counts[1] <= LAYERS
    with pytest.raises(StrategyError, match="less than what recomputing every layer leaves"):
        kinds(graph, "budget(0.001)")


@pytest.mark.parametrize("word", ["modules(attention)", "ops(topk)"])
def test_words_for_nothing_of_this_model_are_refused(graph, word):
    with pytest.raises(StrategyError, match=r"finds no such module|names no operator"):
        kinds(graph, word)


def test_an_mlp_in_chunks_at_the_end_of_a_branch_runs_once():
    llama = sw.capture(*_called(small_llama(5, 16, 4, 8, 8)))
    chunked = with_mlp_chunks(llama, 4)
    for word in ("full", "every(2)", "modules(*.mlp)"):
        assert kinds(chunked, word)[1] == ["chunked_mlp"] * 5
    assert kinds(chunked, "groups(2)")[1] == [], "residual sums inside of a segment run again"
    assert kinds(llama, "full")[1] == []
    seconds = [sw.price(chunked, "1xH100", f"ac={word}").step_seconds for word in ("full", "none")]
    whole = [sw.price(llama, "1xH100", f"ac={word}").step_seconds for word in ("full", "none")]
    assert seconds[0] - seconds[1] < whole[0] - whole[1]


@pytest.mark.hf
def test_an_mlp_before_dropout_runs_again():
    """Its result would be kept for the dropout, which runs again; a copy in its place does not."""
    again, once = kinds(sw.capture(*_called(gpt2(layers=3)), mlp_chunks=2), "full")
    assert all("chunked_mlp" in layer for layer in again) and once == []
    given = _called(gpt2(layers=3, dropout=0.0, batch=64))
    copied, whole = (sw.capture(*given, mlp_chunks=count) for count in (2, 1))
    assert sorted(kinds(copied, "full")[1]) == sorted(3 * ["chunked_mlp", "view", "clone"])
    chunked, full = (sw.price(graph, "1xH100", "ac=full", "sgd") for graph in (copied, whole))
    assert {op.kind for op in chunked.ops if op.kept} == {"chunked_mlp", "view", "clone"}
    assert chunked.memory.saved <= full.memory.saved and chunked.peak_bytes < full.peak_bytes


def _called(given):
    model, batch = given
    return model, (), batch


def test_a_plan_says_that_nothing_is_recomputed(graph):
    plain = sw.price(graph, "2xH100", "dp_shard=2")
    linears = sw.price(graph, "2xH100", "dp_shard=2 ac=modules(*.up)")  # which keep their inputs
    (note,) = linears.notes
    assert note.startswith("ac=modules(*.up) recomputes nothing: what it names keeps only its")
    assert linears.peak_bytes == plain.peak_bytes and plain.notes == ()
    norms = sw.price(graph, "2xH100", "dp_shard=2 ac=modules(layernorm)")
    assert norms.peak_bytes < plain.peak_bytes and norms.notes == ()
