"""Vision transformers, by task."""

from tests.zoo.batches import images, integers
from tests.zoo.building import TOWER, built, pictures


def _segments(full):
    size, image = (8, 512) if full else (5, 64)
    labels = integers(2, size, image, image)
    labels[0, : image // 2] = 255
    return {"pixel_values": images(size, image), "labels": labels}


TRANSFORMERS = {
    "vit": built(
        "ViT",
        "ForImageClassification",
        {**TOWER, "image_size": 8, "patch_size": 4},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        pictures(reduced_size=8),
    ),
    "segformer": built(
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
