"""Decoder-only language models with mixtures of experts."""

from tests.zoo.building import decoder


def _mixture(kind, small, published, length=2048):
    """One layer of four experts when reduced, two of which take a token."""
    few = {
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
    }
    return decoder(kind, {**few, **small}, published, length)


MIXTURES = {
    "mixtral": decoder("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 1}, length=2048),
    "qwen2 moe": _mixture(  # 1.5 A2.7B
        "Qwen2Moe", {"shared_expert_intermediate_size": 10}, {"vocab_size": 151936}
    ),
    "qwen3 moe": _mixture(  # 30B A3B
        "Qwen3Moe",
        {"head_dim": 8, "output_router_logits": True},
        {"vocab_size": 151936, "num_hidden_layers": 48, "head_dim": 128},
    ),
    "olmoe": _mixture(
        "Olmoe",
        {"output_router_logits": True},
        {"vocab_size": 50304, "intermediate_size": 1024},
    ),
    "gpt-oss": _mixture(  # 20B
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"vocab_size": 201088, "num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "llama 4": decoder(  # a third of the layers of Scout, 17B 16E
        "Llama4",
        {
            "intermediate_size": 10,
            "intermediate_size_mlp": 22,
            "interleave_moe_layer_step": 1,
            "head_dim": 4,
            "num_local_experts": 4,
            "num_hidden_layers": 2,
        },
        {"vocab_size": 202048, "num_hidden_layers": 16},
        length=2048,
        part="Text",
    ),
    "granite moe": _mixture(  # 3.0 1B A400M
        "GraniteMoe",
        {"output_router_logits": True},
        {
            "vocab_size": 49155,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek v2": _mixture(  # Lite
        "DeepseekV2",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 6,
            "q_lora_rank": 10,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
    ),
    "ernie 4.5 moe": _mixture(  # 21B A3B
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 2,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
        {"vocab_size": 103424},
    ),
}
