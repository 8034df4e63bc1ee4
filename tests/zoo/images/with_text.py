"""Models that read images and text."""

from tests.zoo.batches import images, tokens
from tests.zoo.building import TOWER, VOCABULARY, built


def _clip(full):
    size, length, vocabulary, image = (32, 77, 49408, 224) if full else (5, 7, VOCABULARY, 8)
    given = tokens(size, length, vocabulary)
    return {
        "input_ids": given["input_ids"],
        "pixel_values": images(size, image),
        "return_loss": True,
    }


WITH_TEXT = {
    "clip": built(
        "CLIP",
        "Model",
        {
            "text_config": {
                **TOWER,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 16,
                "eos_token_id": 2,
                "bos_token_id": 0,
                "pad_token_id": 1,
            },
            "vision_config": {**TOWER, "image_size": 8, "patch_size": 4},
            "projection_dim": 10,
        },
        {},
        _clip,
    ),
}
