"""Encoders and decoders of text."""

from tests.zoo.batches import tokens
from tests.zoo.building import ENCODER_DECODER, VOCABULARY, built, text

_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 22,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}


def _pairs(vocabulary, length=512):
    """Token ids of texts and, as labels, of others that are two tokens shorter."""

    def given(full):
        size, count, below = (8, length, vocabulary) if full else (5, 7, VOCABULARY)
        return {
            "input_ids": tokens(size, count, below)["input_ids"],
            "labels": tokens(size, count - 2, below)["labels"],
        }

    return given


def _translator(kind, small, published, vocabulary, length=512, head="ForConditionalGeneration"):
    """A model whose configuration has BART's names."""
    return built(
        kind,
        head,
        {**ENCODER_DECODER, "max_position_embeddings": 32, **small},
        {"vocab_size": vocabulary, **published},
        _pairs(vocabulary, length),
    )


ENCODER_DECODERS = {
    "t5": built(
        "T5",
        "ForConditionalGeneration",
        _T5,
        {
            "d_model": 1024,
            "d_ff": 4096,
            "num_layers": 24,
            "num_heads": 16,
            "decoder_start_token_id": 0,
        },
        _pairs(32128),
    ),
    "umt5": built(  # small
        "UMT5",
        "ForConditionalGeneration",
        {**_T5, "num_layers": 1},
        {"decoder_start_token_id": 0},
        _pairs(250112),
    ),
    "bart": built(
        "Bart",
        "ForConditionalGeneration",
        {**ENCODER_DECODER, "max_position_embeddings": 32},
        {},
        text(8, 1024, 50265),
    ),
    "mbart": _translator("MBart", {}, {"scale_embedding": True}, 250027),
    "plbart": _translator("PLBart", {}, {}, 50005),
    "pegasus": _translator(
        "Pegasus",
        {},
        {
            "encoder_layers": 16,
            "decoder_layers": 16,
            "scale_embedding": True,
            "activation_function": "relu",
        },
        96103,
    ),
    "marian": _translator(  # opus-mt
        "Marian",
        {},
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "max_position_embeddings": 512,
            "scale_embedding": True,
            "activation_function": "swish",
        },
        58101,
        head="MTModel",
    ),
    "blenderbot": _translator(  # 400M
        "Blenderbot",
        {},
        {
            "d_model": 1280,
            "encoder_layers": 2,
            "decoder_layers": 12,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
        8008,
        length=128,
    ),
    "m2m100": _translator(  # 418M
        "M2M100",
        {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "scale_embedding": True},
        128112,
    ),
    "prophetnet": built(
        "ProphetNet",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 24,
            "encoder_ffn_dim": 22,
            "decoder_ffn_dim": 22,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 6,
            "num_decoder_attention_heads": 6,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 1,
        },
        {"decoder_start_token_id": 102},
        _pairs(30522),
    ),
}
