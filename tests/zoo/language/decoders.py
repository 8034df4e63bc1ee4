"""Decoder-only language models whose layers are dense."""

from tests.zoo.building import VOCABULARY, built, decoder, text

_PADDED = {"pad_token_id": 0}  # where the default is beyond the reduced vocabulary

_LLAMA_LIKE = {
    "llama": decoder(
        "Llama",
        published={
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "llama 3.2": decoder(  # 1B
        "Llama",
        {"tie_word_embeddings": True, "num_hidden_layers": 1},
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": decoder(  # 7B
        "Qwen2",
        {"num_hidden_layers": 1},
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "qwen2.5": decoder(  # 1.5B
        "Qwen2",
        {"tie_word_embeddings": True, "num_hidden_layers": 1, "num_key_value_heads": 2},
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": decoder(
        "Qwen3",
        {"head_dim": 8, "num_hidden_layers": 1},
        {
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
    ),
    "mistral": decoder("Mistral", {"sliding_window": 4, "num_hidden_layers": 1}),
    "gemma": decoder("Gemma", {"head_dim": 8, "num_hidden_layers": 1}, {"vocab_size": 256000}),
    "gemma2": decoder("Gemma2", {"head_dim": 8, "sliding_window": 4}, {"vocab_size": 256000}),
    "phi 3": decoder(  # mini
        "Phi3", {"num_hidden_layers": 1, **_PADDED}, {"vocab_size": 32064, "sliding_window": 2047}
    ),
    "olmo": decoder("Olmo", {"num_hidden_layers": 1}, {"vocab_size": 50304}, length=2048),
    "olmo 2": decoder(
        "Olmo2",
        {"num_hidden_layers": 1},
        {"vocab_size": 100352, "max_position_embeddings": 4096},
    ),
    "granite": decoder(  # 3.0 2B
        "Granite",
        {"num_hidden_layers": 1, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
        {
            "vocab_size": 49155,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": decoder("SmolLM3", {**_PADDED}, {"vocab_size": 128256}),
    "starcoder2": decoder(  # 3B
        "Starcoder2",
        {"num_hidden_layers": 1, "sliding_window": 4},
        {"vocab_size": 49152, "max_position_embeddings": 16384, "sliding_window": 4096},
    ),
    "ernie 4.5": decoder(  # 0.3B
        "Ernie4_5", {"head_dim": 8, "num_hidden_layers": 1}, {"vocab_size": 103424}
    ),
    "glm4": decoder(  # 9B of April 2025
        "Glm4",
        {"head_dim": 8, "num_hidden_layers": 1, **_PADDED},
        {"vocab_size": 151552},
    ),
    "exaone 4": decoder(  # 1.2B
        "Exaone4",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 30,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron": decoder(  # Minitron 4B
        "Nemotron",
        {"head_dim": 8, "num_hidden_layers": 1},
        {
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
        },
    ),
    "stablelm": decoder("StableLm", {"num_hidden_layers": 1}, {"vocab_size": 50304}),
}

# One norm before both attention and feed-forward layers, which run side by side.
_PARALLEL_BLOCKS = {
    "phi 2": decoder(
        "Phi",
        {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 6},
        {
            "vocab_size": 51200,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
        },
        length=2048,
    ),
    "pythia": decoder(  # 1.4B
        "GPTNeoX",
        {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 6},
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        length=2048,
    ),
    "gpt-j": built(
        "GPTJ",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 48,
            "n_layer": 1,
            "n_head": 6,
            "rotary_dim": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        {},
        text(8, 2048, 50400),
    ),
    "falcon": built(  # 7B
        "Falcon",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "max_position_embeddings": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        {},
        text(8, 2048, 65024),
    ),
    "command r7b": decoder(
        "Cohere2",
        {
            "head_dim": 8,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {
            "vocab_size": 256000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}

# Positions that are learnt or that are biases of attention.
_WITHOUT_ROTATION = {
    "gpt2": built(
        "GPT2",
        "LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 30,
            "n_layer": 1,
            "n_head": 6,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        {},
        text(16, 1024, 50257),
    ),
    "gpt neo": built(  # 1.3B
        "GPTNeo",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 16,
            "hidden_size": 24,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 6,
            "intermediate_size": 22,
            "window_size": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        {},
        text(8, 2048, 50257),
    ),
    "opt": built(  # 1.3B
        "OPT",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "hidden_size": 24,
            "word_embed_proj_dim": 24,
            "ffn_dim": 22,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
        },
        {
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
        },
        text(8, 2048, 50272),
    ),
    "bloom": built(  # 560M
        "Bloom",
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 1, "n_head": 6},
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
        text(8, 2048, 250880),
    ),
    "mpt": built(  # 7B
        "Mpt",
        "ForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "n_heads": 4,
            "n_layers": 1,
            "max_seq_len": 16,
        },
        {"vocab_size": 50432, "d_model": 4096, "n_heads": 32, "n_layers": 32},
        text(8, 2048, 50432),
    ),
}

DECODERS = {**_LLAMA_LIKE, **_PARALLEL_BLOCKS, **_WITHOUT_ROTATION}
