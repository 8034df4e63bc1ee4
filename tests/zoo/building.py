"""Factories of transformers' classes, built from configurations alone."""

import torch

from tests.zoo.batches import classes, images, reals, tokens

VOCABULARY = 37  # of reduced models
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "projection_dim": 10,
}

ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 22,
    "decoder_ffn_dim": 22,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def built(kind, head, small, published, batch, part=""):
    """A factory of `<kind><head>`; `batch(published)` gives its arguments.

    The configuration is that of a `part`, as "Text", where that is a model of its own.
    """

    def build(full=False):
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}{part}Config")(**(published if full else small))
        return getattr(transformers, f"{kind}{head}")(config), batch(full)

    return build


def decoder(kind, small=None, published=None, length=4096, head="ForCausalLM", part=""):
    """A decoder-only language model whose configuration has Llama's names."""
    reduced = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "intermediate_size": 22,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        **(small or {}),
    }
    config = {"vocab_size": 32000, **(published or {})}
    batch = text(8, length, config["vocab_size"])
    return built(kind, head, reduced, config, batch, part)


def text(batch, length, vocabulary, reduced_length=7):
    """Token ids and labels of language models."""
    return lambda full: (
        tokens(batch, length, vocabulary) if full else tokens(5, reduced_length, VOCABULARY)
    )


def classifier(kind, small, published=None, reduced_size=32, size=224, batch=32):
    """A classifier of images, of the 1000 classes of ImageNet as published."""

    def given(full):
        count = batch if full else 5
        return {
            "pixel_values": images(count, size if full else reduced_size),
            "labels": classes(count, 1000 if full else 11),
        }

    configs = {"num_labels": 11, **small}, {"num_labels": 1000, **(published or {})}
    return built(kind, "ForImageClassification", *configs, given)


def video_classifier(kind, small, frames, published=None):
    """A classifier of videos of so many frames, of Kinetics' 400 classes as published."""

    def given(full):
        count, length, size = (8, frames, 224) if full else (5, 4, 8)
        return {
            "pixel_values": reals(count, length, 3, size, size),
            "labels": classes(count, 400 if full else 11),
        }

    reduced = {**TOWER, "image_size": 8, "patch_size": 4, "num_frames": 4, "num_labels": 11}
    configs = {**reduced, **small}, {"num_labels": 400, **(published or {})}
    return built(kind, "ForVideoClassification", *configs, given)


def pictures(published_size=224, reduced_size=32, num_classes=2, batch=32):
    def given(full):
        size = batch if full else 5
        return {
            "pixel_values": images(size, published_size if full else reduced_size),
            "labels": classes(size, num_classes),
        }

    return given
