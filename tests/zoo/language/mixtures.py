"""Decoder-only language models with mixtures of experts."""

from tests.zoo.building import decoder

MIXTURES = {
    "mixtral": decoder("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 1}, length=2048),
}
