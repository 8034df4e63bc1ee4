"""Encoders of text with their heads."""

import torch

from tests.zoo.batches import classes, integers, tokens
from tests.zoo.building import VOCABULARY, built, text

_SMALL = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_attention_heads": 6,
}


def _encoder(kind, labels="tokens", small=None, published=None, length=512, head="ForMaskedLM"):
    """A BERT-like encoder with a head.

    `labels` are "tokens" or, of which there are two, "marks" of shape (B, T) or "classes" (B,).
    """
    published = {"vocab_size": 30522, **(published or {})}

    def batch(full):
        size, count, vocabulary = (
            (32, length, published["vocab_size"]) if full else (5, 7, VOCABULARY)
        )
        given = tokens(size, count, vocabulary)
        mask = torch.ones(size, count, dtype=torch.int64)
        mask[0, -2:] = 0
        if labels == "classes":
            given["labels"] = classes(size, 2)
        if labels == "marks":
            given["labels"] = integers(2, size, count)
        return {**given, "attention_mask": mask}

    return built(kind, head, {**_SMALL, **(small or {})}, published, batch)


def _marked(full):
    """Token ids, and as labels which of them were replaced."""
    size, count, vocabulary = (32, 512, 30522) if full else (5, 7, VOCABULARY)
    given = tokens(size, count, vocabulary)
    return {**given, "labels": integers(2, size, count)}


_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
_ROBERTA = {"max_position_embeddings": 514, "vocab_size": 50265}

_ABSOLUTE = {
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta", "classes", published=_ROBERTA, head="ForSequenceClassification"),
    "xlm-roberta": _encoder(
        "XLMRoberta",
        "marks",
        published={"max_position_embeddings": 514, "vocab_size": 250002},
        head="ForTokenClassification",
    ),
    "distilbert": built(
        "DistilBert",
        "ForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "dim": 24,
            "hidden_dim": 21,
            "n_layers": 1,
            "n_heads": 6,
        },
        {},
        text(32, 512, 30522),
    ),
    "albert": _encoder(
        "Albert",
        small={"num_hidden_layers": 2, "embedding_size": 10},
        published={"vocab_size": 30000, **_BASE},
    ),
    "electra": built(  # small, whose loss selects by the mask where it is given one
        "Electra",
        "ForPreTraining",
        {**_SMALL, "embedding_size": 10},
        {},
        _marked,
    ),
    "big bird": _encoder(  # as it reads texts of up to 704 tokens
        "BigBird",
        small={"attention_type": "original_full"},
        published={"vocab_size": 50358, "attention_type": "original_full"},
    ),
    "squeezebert": _encoder(
        "SqueezeBert",
        small={"embedding_size": 24, "num_attention_heads": 4, "intermediate_size": 20},
        published={"embedding_size": 768},
    ),
    "convbert": _encoder("ConvBert", small={"embedding_size": 24, "num_attention_heads": 4}),
    "fnet": built(
        "FNet",
        "ForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "num_hidden_layers": 1,
            "hidden_size": 24,
            "intermediate_size": 22,
            "type_vocab_size": 2,
        },
        {},
        text(32, 512, 32000),
    ),
}

_RELATIVE = {
    "deberta v3": _encoder(
        "DebertaV2",
        small={
            "relative_attention": True,
            "position_buckets": 4,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
        published={
            **_BASE,
            "vocab_size": 128100,
            "num_hidden_layers": 12,
            "relative_attention": True,
            "position_buckets": 256,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "mpnet": _encoder("MPNet", published={"vocab_size": 30527, "max_position_embeddings": 514}),
    "modernbert": _encoder(
        "ModernBert",
        small={
            "num_hidden_layers": 2,
            "local_attention": 4,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        published={"vocab_size": 50368},
        length=1024,
    ),
    "roformer": _encoder(
        "RoFormer",
        small={"embedding_size": 10, "num_attention_heads": 4},
        published={"vocab_size": 50000},
    ),
    "esm 2": _encoder(  # 150M
        "Esm",
        small={
            "mask_token_id": 5,
            "pad_token_id": 1,
            "position_embedding_type": "rotary",
            "token_dropout": True,
        },
        published={
            "vocab_size": 33,
            "mask_token_id": 32,
            "pad_token_id": 1,
            "hidden_size": 640,
            "intermediate_size": 2560,
            "num_hidden_layers": 30,
            "num_attention_heads": 20,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "position_embedding_type": "rotary",
            "token_dropout": True,
        },
    ),
}

ENCODERS = {**_ABSOLUTE, **_RELATIVE}
