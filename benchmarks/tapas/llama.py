"""The network that searches are timed on."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, BATCH = 32000, 2048, 128


def llama(layers: int, width: int, attention: str = "sdpa") -> nn.Module:
    """A Llama in bfloat16 of so many layers, `width` wide, 8 key-value heads of 128."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=width // 128,
        num_key_value_heads=8, max_position_embeddings=LENGTH, attn_implementation=attention,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return model
