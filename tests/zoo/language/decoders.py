"""Decoder-only language models whose layers are dense."""

from tests.zoo.batches import tokens
from tests.zoo.building import VOCABULARY, built, decoder

DECODERS = {
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
        lambda full: tokens(16, 1024, 50257) if full else tokens(5, 7, VOCABULARY),
    ),
    "llama": decoder(
        "Llama",
        published={
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
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
    "gemma2": decoder("Gemma2", {"head_dim": 8, "sliding_window": 4}, {"vocab_size": 256000}),
    "mistral": decoder("Mistral", {"sliding_window": 4, "num_hidden_layers": 1}),
}
