"""Encoders of text with their heads."""

import torch

from tests.zoo.batches import classes, tokens
from tests.zoo.building import VOCABULARY, built


def _encoder(kind, head, labels):
    """A BERT-like encoder with a head, whose labels are of shape (B, T) or (B,)."""
    small = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 22,
        "num_attention_heads": 6,
    }

    def batch(full):
        size, length, vocabulary = (32, 512, 30522) if full else (5, 7, VOCABULARY)
        given = tokens(size, length, vocabulary)
        mask = torch.ones(size, length, dtype=torch.int64)
        mask[0, -2:] = 0
        if labels == "sequence":
            given["labels"] = classes(size, 2)
        return {**given, "attention_mask": mask}

    published = {} if kind == "Bert" else {"max_position_embeddings": 514, "vocab_size": 50265}
    return built(kind, head, small, published, batch)


ENCODERS = {
    "bert": _encoder("Bert", "ForMaskedLM", "tokens"),
    "roberta": _encoder("Roberta", "ForSequenceClassification", "sequence"),
}
