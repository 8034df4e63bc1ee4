"""Small Hugging Face configs of several architectures, with mutations of their fields."""

import json

from hypothesis import strategies as st

TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **TOKENS},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
ENCODER_DECODER = {
    **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, **TOKENS},
    **{"feed_forward_proj": "gated-gelu", "dropout_rate": 0.1, "decoder_start_token_id": 0},
}
CONFIGS = {
    "llama": DECODER
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "attention_dropout": 0.0},
    "mixtral": DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": TOKENS
    | {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "n_inner": 64}
    | {"activation_function": "gelu_new", "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5},
    "t5": ENCODER_DECODER | {"architectures": ["T5ForConditionalGeneration"]},
    "bert": DECODER | {"architectures": ["BertForMaskedLM"], "type_vocab_size": 2},
    "mamba": {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "expand": 2},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_channels": 3}
    | {"architectures": ["ViTForImageClassification"], "id2label": {"0": "a", "1": "b"}},
}
OF_IMAGES = ("vit",)

_OTHERS = (
    *("_attn_implementation", "attn_implementation", "_experts_implementation", "dtype"),
    *("torch_dtype", "architectures", "auto_map", "trust_remote_code", "quantization_config"),
    *("output_attentions", "output_hidden_states", "return_dict", "rope_scaling", "rope_theta"),
    *("rope_parameters", "problem_type", "num_labels", "id2label", "pruned_heads", "head_dim"),
    *("tie_word_embeddings", "chunk_size_feed_forward", "layer_types", "sliding_window"),
    *("text_config", "vision_config", "model_type", "name_or_path", "attribute_map", "to_dict"),
    *("__class__", "self", "base_model_pp_plan", "per_layer_config", "use_kernels", "backbone"),
    *("save_pretrained", "sub_configs", "decoder", "use_cache", "validate", "initializer_range"),
)
_ROPES = (
    {"rope_type": "yarn"},
    {"rope_type": "yarnn", "factor": 2.0},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "dynamic", "factor": -1},
    {"rope_type": "llama3", "factor": "8"},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1], "long_factor": [1]},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
)
_VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, -64, 2**31 - 1, 2**31, 2**62, 2**70, 10**9),
    *(1e2, 1.5, -0.0, -1e308, 1e308, float("nan"), float("inf"), "", "64", "silu", "gellu"),
    *("org/kernel", "flash_attention_2", "flex_attention", "os.system", "\x1b[2J", "a\nb"),
    *([], [1], [0], [-1, -1], [2, 10**9], ["x", "y"], [None], [[[[1]]]], ["HfArgumentParser"]),
    *({}, {"a": 1}, {"auto_map": {"AutoConfig": "org/name--code.Config"}}, *_ROPES),
)


@st.composite
def mutated(draw):
    """The model type of a config, and the fields of it with one to three of them changed."""
    kind = draw(st.sampled_from(sorted(CONFIGS)))
    data = {"model_type": kind, **CONFIGS[kind]}
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from(sorted(data)) | st.sampled_from(_OTHERS))
        old = data.get(key)
        if type(old) is int and draw(st.booleans()):
            data[key] = draw(
                st.sampled_from((old + 1, old - 1, -old, 3 * old, str(old), 1.0 * old))
            )
        else:
            data[key] = draw(st.sampled_from(_VALUES))
    return kind, json.loads(json.dumps(data))
