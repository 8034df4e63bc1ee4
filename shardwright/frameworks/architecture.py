"""The Hugging Face `config.json` of a model that a framework's config describes.

torchtitan's flavors have the shapes of its registries (torchtitan/models/*/__init__.py); what these
do not say is as in the configs that the models were published with. Megatron-LM's flags have the
classes of transformers with the same matrices: Llama (SwiGLU), Mixtral (SwiGLU experts), Nemotron
(squared ReLU) and StarCoder2 (GELU). Norms, biases and position embeddings may differ from the
framework's own; they have under a thousandth of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.frameworks.config import ModelHints
from shardwright.frameworks.errors import FrameworkError
from shardwright.frameworks.models import Flavor, flavor_of

Fields = dict[str, Any]  # of a config.json

_POSITIONS = 131_072  # at least; rotary position embeddings have no parameters
_ASK = "give --model with a config.json, or a flavor such as 'llama3 8B'"


def config_json(model: ModelHints, tokens: int) -> Fields:
    """The fields of the `config.json` of a model for sequences of so many `tokens`.

    Raises `FrameworkError` where the shape is not known, with what is missing.
    """
    known = flavor_of(model)
    if known is not None:
        fields = _FAMILIES[_family(known)](known)
    elif model.feed_forward is not None:
        fields = _megatron(model)
    else:
        what = f"the shape of the model {model.name!r}" if model.name else "the model"
        raise FrameworkError(f"{what} is not known; {_ASK}")
    return {**fields, "max_position_embeddings": max(_POSITIONS, tokens)}


def _family(known: Flavor) -> str:
    return str(known.model.name).partition(" ")[0]


def _decoder(kind: str, known: Flavor) -> Fields:
    """The fields that all decoders have."""
    model = known.model
    return {
        "model_type": kind,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": known.head_dim,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": known.tied,
    }


def _qwen3(known: Flavor) -> Fields:
    model = known.model
    if model.experts is None:
        return _decoder("qwen3", known)
    fields = _decoder("qwen3_moe", known)
    del fields["intermediate_size"]  # no layer is dense
    return fields | {
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _deepseek_v3(known: Flavor) -> Fields:
    model, fields = known.model, _decoder("deepseek_v3", known)
    del fields["head_dim"]  # follows from the parts below
    large = model.hidden == 7168
    return fields | {
        "q_lora_rank": 1536 if large else None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "n_shared_experts": known.shared_experts,
        "moe_intermediate_size": model.expert_ffn,
        "first_k_dense_replace": known.dense_layers,
        "n_group": 8 if large else 1,
        "topk_group": 4 if large else 1,
    }


def _gpt_oss(known: Flavor) -> Fields:
    model, fields = known.model, _decoder("gpt_oss", known)
    return fields | {
        "intermediate_size": model.expert_ffn,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": 128,
    }


def _llama4(known: Flavor) -> Fields:
    model, fields = known.model, _decoder("llama4_text", known)
    return fields | {
        "intermediate_size": model.expert_ffn,
        "intermediate_size_mlp": model.ffn,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "interleave_moe_layer_step": 2 if known.dense_layers else 1,
    }


_FAMILIES: Mapping[str, Callable[[Flavor], Fields]] = {
    "llama3": lambda known: _decoder("llama", known),
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
}

_MEGATRON = {"swiglu": ("llama", "silu"), "squared-relu": ("nemotron", "relu2")}
_MEGATRON |= {"gelu": ("starcoder2", "gelu_pytorch_tanh")}


def _megatron(model: ModelHints) -> Fields:
    """The model of Megatron-LM's flags."""
    needed = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "vocab-size": model.vocabulary,
    }
    if missing := [name for name, size in needed.items() if size is None]:
        named = ", ".join(f"--{name}" for name in missing)
        raise FrameworkError(f"the shape of the model is not complete, {named} is missing; {_ASK}")
    kind, activation = _MEGATRON[str(model.feed_forward)]
    fields: Fields = {
        "model_type": kind,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "intermediate_size": model.ffn,
        "hidden_act": activation,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": bool(model.tied),
    }
    if model.head_dim is not None:
        if kind == "starcoder2":
            raise FrameworkError(f"GELU layers with --kv-channels have no class here; {_ASK}")
        fields["head_dim"] = model.head_dim
    if model.experts is not None:
        if kind != "llama":
            raise FrameworkError(f"experts without --swiglu have no class here; {_ASK}")
        fields |= {
            "model_type": "mixtral",
            "intermediate_size": model.expert_ffn or model.ffn,
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
        }
    return fields
