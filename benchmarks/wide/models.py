"""Language models that are long, wide or sparse: as published, and small enough for local ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SEED = 0
Built = tuple[nn.Module, dict[str, Any]]


def llama_8b(batch: int = 8, length: int = 2**17) -> Built:
    """Llama-3-8B's shape in bfloat16, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((batch, length), dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def mixtral_8x7b(batch: int = 128, length: int = 2048) -> Built:
    """Mixtral-8x7B's shape in bfloat16, on the meta device."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((batch, length), dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def mixtral() -> Built:
    """Two layers of eight experts that are most of the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(SEED)
    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config), _tokens(512, 4, 128)


def llama(words: int, batch: int, length: int, **sizes: int) -> Built:
    """A small Llama with two queries to each key."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=words, max_position_embeddings=length, num_attention_heads=4,
        num_key_value_heads=2, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(words, batch, length)


def wordy() -> Built:
    """One layer under a vocabulary that is most of the model."""
    return llama(32001, 4, 64, hidden_size=192, intermediate_size=512, num_hidden_layers=1)


def lengthy() -> Built:
    """Four layers of 256 on 8k tokens."""
    return llama(1024, 1, 2**13, hidden_size=256, intermediate_size=768, num_hidden_layers=4)


def longest() -> Built:
    """Two layers of 128 on 32k tokens, under a vocabulary of 4096."""
    return llama(4096, 1, 2**15, hidden_size=128, intermediate_size=512, num_hidden_layers=2)


def _tokens(words: int, batch: int, length: int) -> dict[str, Any]:
    ids = torch.randint(words, (batch, length))
    return {"input_ids": ids, "labels": ids, "use_cache": False}
