"""Encoders and decoders of text."""

from tests.zoo.batches import tokens
from tests.zoo.building import ENCODER_DECODER, VOCABULARY, built


def _t5(full):
    size, length, vocabulary = (8, 512, 32128) if full else (5, 7, VOCABULARY)
    given = tokens(size, length, vocabulary)
    return {**given, "labels": tokens(size, length - 2, vocabulary)["labels"]}


ENCODER_DECODERS = {
    "t5": built(
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 22,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 6,
            "decoder_start_token_id": 0,
        },
        {
            "d_model": 1024,
            "d_ff": 4096,
            "num_layers": 24,
            "num_heads": 16,
            "decoder_start_token_id": 0,
        },
        _t5,
    ),
    "bart": built(
        "Bart",
        "ForConditionalGeneration",
        {**ENCODER_DECODER, "max_position_embeddings": 32},
        {},
        lambda full: tokens(8, 1024, 50265) if full else tokens(5, 7, VOCABULARY),
    ),
}
