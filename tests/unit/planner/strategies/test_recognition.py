"""Plans read back as strategies: every field that shows, and the nearest of searched ones."""

from dataclasses import replace

import pytest
import torch

import shardwright as sw
from shardwright.planner.strategies.recognition import same_decisions, strategy_of

TEXTS = (
    "dp_replicate=4 zero=0",
    "dp_shard=4",
    "dp_shard=4 reshard=off",
    "dp_replicate=2 dp_shard=2",
    "dp_shard=2 tp=2",
    "dp_shard=2 tp=2 sp=off ac=full mb=2",
    "dp_shard=2 tp=2 order=pp,dp_replicate,tp,cp,dp_shard",
    "dp_shard=2 pp=2 mb=4 order=dp_replicate,dp_shard,pp,cp,tp",
    "dp_shard=2 cp=2 ac=every(2)",
    "dp_shard=2 cp=2 cp_style=all-gather",
    "dp_shard=2 cp=2 cp_style=ulysses ac=first(3)",
    "dp_shard=4 ac=full mlp=chunked(2)",
    "dp_shard=4 loss=chunked(4) mlp=chunked(2)",
    "dp_shard=2 pp=2 mb=4",
    "dp_shard=2 pp=2:GPipe mb=4 reshard=on",
    "tp=2 pp=2:Interleaved1F1B/v2 mb=4 cut=1,1,2,1",
)


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


@pytest.mark.parametrize("text", TEXTS)
def test_a_plan_without_its_name_is_read_back_as_its_strategy(graph, text):
    plan = sw.price(graph, "2x2xH100", text)
    assert strategy_of(plan) == sw.Strategy.parse(text)
    found = strategy_of(replace(plan, name="searched"))
    again = sw.price(graph, "2x2xH100", found)
    assert same_decisions(plan, again), f"{text} was read as {found}"


def test_a_searched_plan_has_a_nearest_strategy_that_is_priced_beside_it(graph):
    plan = sw.search(graph, "2x2xH100").fastest()
    nearest = strategy_of(plan)
    assert nearest.devices == 4
    other = sw.price(graph, "2x2xH100", nearest)
    assert other.step_seconds >= plan.step_seconds * (1 - 1e-9)
    assert not same_decisions(plan, sw.price(graph, "2x2xH100", "tp=2 dp_replicate=2 zero=0"))
