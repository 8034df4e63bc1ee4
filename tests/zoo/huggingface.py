"""Hugging Face families with their task heads and labels, built from configurations alone."""

import torch

from tests.zoo.batches import classes, images, integers, reals, tokens

VOCABULARY = 37


def _build(kind, head, small, published, batch):
    """A factory of `<kind><head>`; `batch(published)` gives its arguments."""

    def build(full=False):
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**(published if full else small))
        return getattr(transformers, f"{kind}{head}")(config), batch(full)

    return build


def _decoder(kind, small=None, published=None, length=4096):
    """A decoder-only language model."""
    reduced = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 21,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        **(small or {}),
    }
    config = {"vocab_size": 32000, **(published or {})}
    return _build(
        kind,
        "ForCausalLM",
        reduced,
        config,
        lambda full: tokens(8, length, config["vocab_size"]) if full else tokens(5, 7, VOCABULARY),
    )


def _encoder(kind, head, labels):
    """A BERT-like encoder with a head, whose labels are of shape (B, T) or (B,)."""
    small = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_hidden_layers": 1,
        "hidden_size": 24,
        "intermediate_size": 21,
        "num_attention_heads": 3,
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
    return _build(kind, head, small, published, batch)


def _t5(full):
    size, length, vocabulary = (8, 512, 32128) if full else (5, 7, VOCABULARY)
    given = tokens(size, length, vocabulary)
    return {**given, "labels": tokens(size, length - 2, vocabulary)["labels"]}


def _clip(full):
    size, length, vocabulary, image = (32, 77, 49408, 224) if full else (5, 7, VOCABULARY, 8)
    given = tokens(size, length, vocabulary)
    return {
        "input_ids": given["input_ids"],
        "pixel_values": images(size, image),
        "return_loss": True,
    }


def _whisper(full):
    size, length, frames, vocabulary = (16, 448, 3000, 51865) if full else (5, 7, 16, VOCABULARY)
    return {
        "input_features": reals(size, 80 if full else 6, frames),
        "labels": tokens(size, length, vocabulary)["labels"],
    }


def _mobilenet(full=False):
    """The reduced one without most of the blocks that repeat the one before."""
    build = _build(
        "MobileNetV2",
        "ForImageClassification",
        {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4},
        {},
        _pictures(),
    )
    model, batch = build(full)
    if not full:
        blocks = model.mobilenet_v2.layer
        repeats = [block for block in blocks if block.use_residual]
        kept = [block for block in blocks if block not in repeats[1:]]
        model.mobilenet_v2.layer = torch.nn.ModuleList(kept)
    return model, batch


def _pictures(published_size=224, reduced_size=32, num_classes=2, batch=32):
    def given(full):
        size = batch if full else 5
        return {
            "pixel_values": images(size, published_size if full else reduced_size),
            "labels": classes(size, num_classes),
        }

    return given


def _segments(full):
    size, image = (8, 512) if full else (5, 64)
    labels = integers(2, size, image, image)
    labels[0, : image // 2] = 255
    return {"pixel_values": images(size, image), "labels": labels}


_ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 21,
    "decoder_ffn_dim": 21,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 21,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "projection_dim": 10,
}


HUGGING_FACE = {
    "gpt2": _build(
        "GPT2",
        "LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 16,
            "n_embd": 30,
            "n_layer": 1,
            "n_head": 3,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        {},
        lambda full: tokens(16, 1024, 50257) if full else tokens(5, 7, VOCABULARY),
    ),
    "llama": _decoder(
        "Llama",
        published={
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
    ),
    "qwen3": _decoder(
        "Qwen3",
        {"head_dim": 8, "num_hidden_layers": 1},
        {
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
    ),
    "gemma2": _decoder("Gemma2", {"head_dim": 8, "sliding_window": 4}, {"vocab_size": 256000}),
    "mistral": _decoder("Mistral", {"sliding_window": 4, "num_hidden_layers": 1}),
    "mixtral": _decoder("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 1}, length=2048),
    "bert": _encoder("Bert", "ForMaskedLM", "tokens"),
    "roberta": _encoder("Roberta", "ForSequenceClassification", "sequence"),
    "t5": _build(
        "T5",
        "ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": 24,
            "d_kv": 8,
            "d_ff": 21,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 3,
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
    "bart": _build(
        "Bart",
        "ForConditionalGeneration",
        {**_ENCODER_DECODER, "max_position_embeddings": 32},
        {},
        lambda full: tokens(8, 1024, 50265) if full else tokens(5, 7, VOCABULARY),
    ),
    "vit": _build(
        "ViT",
        "ForImageClassification",
        {**_TOWER, "image_size": 8, "patch_size": 4},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        _pictures(reduced_size=8),
    ),
    "clip": _build(
        "CLIP",
        "Model",
        {
            "text_config": {
                **_TOWER,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
                "bos_token_id": 0,
                "pad_token_id": 1,
            },
            "vision_config": {**_TOWER, "image_size": 8, "patch_size": 4},
            "projection_dim": 10,
        },
        {},
        _clip,
    ),
    "whisper": _build(
        "Whisper",
        "ForConditionalGeneration",
        {
            **_ENCODER_DECODER,
            "num_mel_bins": 6,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
        {},
        _whisper,
    ),
    "mamba2": _build(
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
    "convnext": _build(
        "ConvNext",
        "ForImageClassification",
        {"hidden_sizes": [6, 8, 10, 12], "depths": [1, 2, 1, 1], "drop_path_rate": 0.2},
        {"drop_path_rate": 0.1},
        _pictures(),
    ),
    "resnet": _build(
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 2]},
        {},
        _pictures(),
    ),
    "mobilenet_v2": _mobilenet,
    "segformer": _build(
        "Segformer",
        "ForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "hidden_sizes": [4, 6],
            "num_attention_heads": [1, 2],
            "depths": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [4, 4],
            "decoder_hidden_size": 12,
        },
        {},
        _segments,
    ),
}
