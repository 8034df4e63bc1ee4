"""Models that read images and text."""

from tests.zoo.batches import images, reals, tokens
from tests.zoo.building import TOWER, VOCABULARY, built

PATCHES = {**TOWER, "image_size": 8, "patch_size": 4}
TEXT = {
    **TOWER,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 1,
}
TOWERS = {"text_config": TEXT, "vision_config": PATCHES}


def _pairs(vocabulary, length=77, image=224, **more):
    """Images and their texts."""

    def given(full):
        batch, ids, size = (32, (length, vocabulary), image) if full else (5, (7, VOCABULARY), 8)
        return {
            "input_ids": tokens(batch, *ids)["input_ids"],
            "pixel_values": images(batch, size),
            **more,
        }

    return given


def matcher(kind, vocabulary, small=None, published=None, length=77, image=224):
    """Two towers with a contrastive loss over the batch."""
    return built(
        kind,
        "Model",
        {**TOWERS, **(small or {})},
        published or {},
        _pairs(vocabulary, length, image, return_loss=True),
    )


def _captions(vocabulary, length, image):
    """Images and their captions."""

    def given(full):
        batch, ids, size = (16, (length, vocabulary), image) if full else (5, (7, VOCABULARY), 8)
        return {**tokens(batch, *ids), "pixel_values": images(batch, size)}

    return given


def _cut_out(full):
    batch, ids, image = (16, (77, 49408), 352) if full else (5, (7, VOCABULARY), 8)
    return {
        "input_ids": tokens(batch, *ids)["input_ids"],
        "pixel_values": images(batch, image),
        "labels": reals(batch, image, image).sigmoid(),
    }


WITH_TEXT = {
    "clip": matcher("CLIP", 49408, {"projection_dim": 10}),
    "siglip": matcher("Siglip", 32000, length=64),
    "chinese clip": matcher(
        "ChineseCLIP", 21128, {"projection_dim": 10}, {"text_config": {"vocab_size": 21128}}
    ),
    "clipseg": built(
        "CLIPSeg",
        "ForImageSegmentation",
        {
            **TOWERS,
            "projection_dim": 10,
            "extract_layers": [0],
            "reduce_dim": 12,
            "decoder_num_attention_heads": 6,
            "decoder_intermediate_size": 18,
        },
        {"vision_config": {"patch_size": 16}, "reduce_dim": 64},
        _cut_out,
    ),
    "blip": built(
        "Blip",
        "ForConditionalGeneration",
        {
            "text_config": {**TEXT, "encoder_hidden_size": 24, "sep_token_id": 2},
            "vision_config": PATCHES,
            "projection_dim": 10,
            "image_text_hidden_size": 12,
        },
        {},
        _captions(30524, 40, 384),
    ),
    "git": built(
        "Git",
        "ForCausalLM",
        {**TEXT, "vision_config": PATCHES},
        {},
        _captions(30522, 40, 224),
    ),
}
