"""Language models with state spaces or linear attention, alone or beside attention."""

from tests.zoo.building import VOCABULARY, built, decoder, text

_MAMBA_2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 4,
    "mamba_chunk_size": 4,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}


def _alternating(count, *attention, mixer="linear_attention", other="full_attention"):
    """Types of layers: `other` at the given ones, `mixer` elsewhere."""
    return [other if i in attention else mixer for i in range(count)]


def _nemotron(pattern):
    """Types of layers from a pattern as Nemotron-H publishes it."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return [kinds[sign] for sign in pattern]


STATE_SPACE = {
    "mamba2": built(
        "Mamba2",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "num_hidden_layers": 1,
            "num_heads": 6,
            "head_dim": 8,
            "state_size": 4,
            "n_groups": 2,
            "chunk_size": 4,
        },
        {
            "vocab_size": 50288,
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "num_heads": 24,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
        },
        text(16, 2048, 50277),
    ),
    "bamba": decoder(  # 9B
        "Bamba",
        {"attn_layer_indices": [1], **_MAMBA_2},
        {"vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128},
        length=2048,
    ),
    "falcon h1": decoder(  # 0.5B
        "FalconH1",
        {"num_hidden_layers": 1, "mamba_d_ssm": 48, **_MAMBA_2},
        {
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
        length=2048,
    ),
    "zamba2": decoder(  # 1.2B
        "Zamba2",
        {
            "layers_block_type": _alternating(2, 1, other="hybrid"),
            "mamba_d_state": 4,
            "mamba_ngroups": 1,
            "n_mamba_heads": 6,
            "chunk_size": 4,
            "adapter_rank": 3,
        },
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 38,
            "layers_block_type": _alternating(38, *range(5, 38, 6), other="hybrid"),
            "mamba_d_state": 128,
            "n_mamba_heads": 64,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
        length=2048,
    ),
    "granite hybrid": decoder(  # 4.0 H Tiny
        "GraniteMoeHybrid",
        {
            **_MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 14,
            **_MAMBA_2,
        },
        {
            "vocab_size": 100352,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "shared_intermediate_size": 1024,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "num_experts_per_tok": 6,
            "layer_types": _alternating(40, 5, 15, 25, 35),
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078125,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
        length=2048,
    ),
    "nemotron h": decoder(  # 8B
        "NemotronH",
        {
            "layers_block_type": _nemotron("M*-"),
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 4,
            "chunk_size": 4,
            "head_dim": 8,
        },
        {
            "vocab_size": 131072,
            "layers_block_type": _nemotron("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"),
        },
        length=2048,
    ),
    "lfm2": decoder(  # 1.2B
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 7},
        {
            "vocab_size": 65536,
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "layer_types": _alternating(16, 2, 5, 8, 10, 12, 14, mixer="conv"),
        },
    ),
    "lfm2 moe": decoder(  # 8B A1B
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
        },
        {
            "vocab_size": 65536,
            "num_hidden_layers": 24,
            "layer_types": _alternating(24, 2, 6, 10, 14, 18, 21, mixer="conv"),
        },
    ),
}
