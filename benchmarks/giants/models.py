"""Ten models of more than a hundred billion parameters, as their publishers give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.public_models import CONFIGS

_MISTRAL_LARGE: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": None,
}
_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
# DeepSeek-V3 with more experts, fewer heads and one dense layer.
_KIMI_K2: dict[str, Any] = {
    **CONFIGS["DeepSeek-V3"],
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# The language model alone, without images.
_MAVERICK: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 202048,
    "max_position_embeddings": 1048576,
    "tie_word_embeddings": False,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "use_qk_norm": False,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
_MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "torch_dtype": "bfloat16",
    "vocab_size": 200064,
    "max_position_embeddings": 196608,
    "tie_word_embeddings": False,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True, slots=True)
class Giant:
    """A model, the tokens of a step, and strategies of a framework beside it.

    Attributes:
        config: the contents of its config.json.
        source: where the degrees of the strategies are from.
        strategies: for 256 devices, equal in degrees.
        batch: sequences of a step on all devices.
        tokens: of a sequence.
    """

    config: dict[str, Any]
    source: str
    strategies: tuple[str, ...]
    batch: int = 1024
    tokens: int = 4096


def _kept(degrees: str) -> tuple[str, str]:
    """With sharded state, without and with layers recomputed."""
    return f"{degrees} zero=1", f"{degrees} zero=1 ac=full"


_BRIDGE = "Megatron-Bridge, on H100"
_AS_QWEN = "those of Qwen3-235B"
_AS_70B = "torchtitan's of Llama-3.1-70B"
_TP_2_PP_8 = "dp_shard=16 tp=2 pp=8 ep=32 mb=64"
GIANTS = {
    "Llama-3.1-405B": Giant(
        CONFIGS["Llama-3.1-405B"],
        "Megatron-LM's, with fewer devices",
        (
            "dp_shard=2 tp=8 pp=16 mb=128 zero=1 ac=ops(mm/2,attention)",
            "dp_shard=4 tp=8 pp=8:Interleaved1F1B/v4 mb=64 zero=1 ac=full",
        ),
    ),
    "Mistral-Large-2": Giant(_MISTRAL_LARGE, _AS_70B, ("dp_shard=32 tp=8 ac=full",)),
    "Mixtral-8x22B": Giant(_MIXTRAL, "arXiv 2504.14960", _kept("dp_shard=16 tp=2 pp=8 ep=8 mb=64")),
    "Qwen3-235B-A22B": Giant(CONFIGS["Qwen3-235B-A22B"], _BRIDGE, _kept(_TP_2_PP_8)),
    "GLM-4.5": Giant(CONFIGS["GLM-4.5"], _AS_QWEN, _kept(_TP_2_PP_8)),
    "DeepSeek-V3": Giant(CONFIGS["DeepSeek-V3"], f"{_BRIDGE}, with half of EP", _kept(_TP_2_PP_8)),
    "Kimi-K2": Giant(_KIMI_K2, "Megatron-Bridge, on GB300", _kept("dp_shard=64 pp=4 ep=64 mb=16")),
    "Llama-4-Maverick": Giant(_MAVERICK, _AS_70B, ("dp_shard=32 tp=8 ac=full",)),
    "gpt-oss-120b": Giant(_GPT_OSS, _BRIDGE, _kept("dp_shard=64 pp=4 ep=8 mb=16")),
    "MiniMax-M2": Giant(_MINIMAX_M2, _AS_QWEN, _kept(_TP_2_PP_8)),
    "Llama-3.1-405B, long": Giant(
        CONFIGS["Llama-3.1-405B"],
        "CP and TP of arXiv 2407.21783",
        ("dp_shard=2 cp=16 tp=8 mb=4 ac=full", "dp_shard=2 cp=16 tp=8 ac=full"),
        batch=32,
        tokens=131072,
    ),
    "Llama-3.1-405B, few samples": Giant(
        CONFIGS["Llama-3.1-405B"],
        "CP and TP of arXiv 2407.21783",
        ("dp_shard=2 cp=16 tp=8 ac=full", "dp_shard=16 cp=2 tp=8 ac=full"),
        batch=16,
        tokens=131072,
    ),
}
