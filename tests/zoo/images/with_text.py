"""Models that read images and text."""

import torch

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


def _placed_images(full):
    """Texts with the features of an image each, which are placed at the tokens that stand for it.

    As LLaVA 1.5 has them: 24 x 24 patches of an image of 336 x 336 pixels.
    """
    count, length, vocabulary, image, patches = (
        (8, 2048, 32000, 336, 576) if full else (5, 9, VOCABULARY - 1, 8, 4)
    )
    batch = tokens(count, length, vocabulary)
    batch["input_ids"][:, 1 : 1 + patches] = vocabulary
    batch["labels"][:, : 1 + patches] = -100
    return {**batch, "pixel_values": images(count, image)}


def _sized_images(full):
    """The same where each image says how many patches it has, which are the rows of one tensor.

    Windows of attention are made from these sizes, which have values on the meta device too;
    positions from the kinds of tokens, which are left out there: positions are then those of text.
    """
    count, length, vocabulary, side = (2, 2048, 151643, 16) if full else (5, 12, 30, 4)
    patches, width, image = side * side, *((1176, 151655) if full else (24, 36))
    marked = slice(1, 1 + patches // 4)  # four patches are the features of one token
    batch = tokens(count, length, vocabulary)
    batch["input_ids"][:, marked] = image
    batch["labels"][:, : marked.stop] = -100
    batch["pixel_values"] = reals(count * patches, width)
    batch["image_grid_thw"] = torch.tensor([[1, side, side]] * count, device="cpu")
    if not full:
        batch["mm_token_type_ids"] = (batch["input_ids"] == image).int()
    return batch


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
    "llava": built(  # 1.5 7B
        "Llava",
        "ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {
                **PATCHES,
                "model_type": "clip_vision_model",
                "num_hidden_layers": 2,
            },
            "image_token_index": VOCABULARY - 1,
            "image_seq_length": 4,
        },
        {},
        _placed_images,
    ),
    "qwen2.5 vl": built(  # 3B
        "Qwen2_5_VL",
        "ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [1, 1, 0],
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 24,
                "intermediate_size": 22,
                "num_heads": 6,
                "patch_size": 2,
                "window_size": 8,
                "out_hidden_size": 24,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 36,
            "video_token_id": 35,
            "vision_start_token_id": 34,
            "vision_end_token_id": 33,
        },
        {
            "text_config": {
                "vocab_size": 151936,
                "hidden_size": 2048,
                "intermediate_size": 11008,
                "num_hidden_layers": 36,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [16, 24, 24],
                },
            },
            "vision_config": {"hidden_size": 1280, "out_hidden_size": 2048},
            "tie_word_embeddings": True,
        },
        _sized_images,
    ),
}
