"""Mixtures in bfloat16 are verified in float64.

A user planned a Mixtral with `precision="bf16"` and verified the plan: "Expected mat_a to be
Float32, BFloat16 or Float16 matrix, got Double". In bfloat16 rows of 16 bytes are multiplied by
torch's grouped product, which has no float64. Now each expert's rows are multiplied on their own
there.
"""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import shardwright as sw


@pytest.mark.ranks
@pytest.mark.hf
def test_a_mixture_in_bfloat16_is_verified():
    config = MixtralConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = MixtralForCausalLM(config)
    ids = torch.randint(19, (4, 5), generator=torch.Generator().manual_seed(4))
    batch = {"input_ids": ids, "labels": ids}
    graph = sw.capture(model, (), batch, precision="bf16")
    (op,) = (op for op in graph.ops if op.kind == "experts")
    assert op.args[6] == "aten._grouped_mm.default"
    assert sw.verify(model, sw.price(graph, "2xcpu", "dp_shard=2 ep=2", "sgd"), (), batch).ok
