"""Configurations of well-known language models, as their publishers give them."""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _qwen3_moe(hidden: int, experts: int, layers: int, heads: int, keys: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "hidden_size": hidden,
        "moe_intermediate_size": experts,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


# The contents of config.json, by name: what these models are, without what inference alone reads.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.1-405B": _llama(16384, 53248, 126, 128),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32, 4),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64, 4),
    "T5-base": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 768,
        "d_kv": 64,
        "d_ff": 3072,
        "num_layers": 12,
        "num_heads": 12,
        "decoder_start_token_id": 0,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "n_routed_experts": 160,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}
