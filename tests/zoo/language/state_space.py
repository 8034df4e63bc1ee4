"""Language models with state spaces or linear attention, alone or beside attention."""

from tests.zoo.batches import tokens
from tests.zoo.building import VOCABULARY, built

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
        lambda full: tokens(16, 2048, 50277) if full else tokens(5, 7, VOCABULARY),
    ),
}
