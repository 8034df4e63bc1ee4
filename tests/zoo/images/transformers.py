"""Vision transformers, by task."""

from tests.zoo.batches import images, integers
from tests.zoo.building import TOWER, built, classifier, pictures, video_classifier

PATCHES = {**TOWER, "image_size": 8, "patch_size": 4}
WINDOWS = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 1],
    "num_heads": [3, 6],
    "window_size": 4,
}
PYRAMID = {  # of reduced models whose stages attend to fewer and fewer places
    "num_encoder_blocks": 2,
    "hidden_sizes": [4, 6],
    "num_attention_heads": [1, 2],
    "depths": [1, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "mlp_ratios": [4, 4],
}
EVEN = {"patch_sizes": [4, 2], "strides": [4, 2]}


def _segments(full):
    size, image = (8, 512) if full else (5, 64)
    labels = integers(2, size, image, image)
    labels[0, : image // 2] = 255
    return {"pixel_values": images(size, image), "labels": labels}


def _masked(full):
    size, image = (64, 224) if full else (5, 8)
    return {"pixel_values": images(size, image)}


def _labelled(published_size, reduced_size, count):
    def given(full):
        size, image, below = (8, published_size, count) if full else (5, reduced_size, 3)
        return {"pixel_values": images(size, image), "labels": integers(below, size, image, image)}

    return given


CLASSIFIERS = {
    "deit": classifier("DeiT", PATCHES, reduced_size=8),
    "beit": classifier(
        "Beit",
        {**PATCHES, "use_relative_position_bias": True},
        {"use_relative_position_bias": True},
        reduced_size=8,
    ),
    "dinov2": classifier(
        "Dinov2",
        {**PATCHES, "drop_path_rate": 0.1},
        {"image_size": 518, "patch_size": 14},
        reduced_size=8,
        size=518,
        batch=16,
    ),
    "swin": classifier("Swin", WINDOWS, reduced_size=16),
    "swinv2": classifier(
        "Swinv2", WINDOWS, {"image_size": 256, "window_size": 8}, reduced_size=16, size=256
    ),
    "pvt": classifier(
        "Pvt", {**PYRAMID, **EVEN, "image_size": 32, "sequence_reduction_ratios": [2, 1]}
    ),
    "pvt v2": classifier(
        "PvtV2",
        {
            **PYRAMID,
            "image_size": 32,
            "sr_ratios": [2, 1],
        },
    ),
    "levit": classifier(
        "Levit",
        {
            "image_size": 64,
            "hidden_sizes": [12, 18, 24],
            "num_attention_heads": [2, 3, 3],
            "depths": [1, 1, 1],
            "key_dim": [6, 6, 6],
        },
        reduced_size=64,
    ),
    "cvt": classifier(
        "Cvt",
        {
            "embed_dim": [6, 12, 18],
            "num_heads": [1, 3, 3],
            "depth": [1, 2, 3],
        },
    ),
    "mobilevit": classifier(
        "MobileViT",
        {
            "image_size": 32,
            "hidden_sizes": [12, 12, 18],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 10],
            "num_attention_heads": 6,
            "expand_ratio": 2.0,
        },
        size=256,
    ),
    "hiera": classifier(
        "Hiera",
        {
            "image_size": [32, 32],
            "embed_dim": 12,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "masked_unit_size": [2, 2],
            "num_query_pool": 1,
            "query_stride": [2, 2],
        },
    ),
    "focalnet": classifier(
        "FocalNet",
        {
            "image_size": 16,
            "patch_size": 4,
            "embed_dim": 12,
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        reduced_size=16,
    ),
    "poolformer": classifier(
        "PoolFormer",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [6, 10],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "padding": [2, 1],
            "mlp_ratio": 2.0,
        },
    ),
}

TRANSFORMERS = {
    "vit": built(
        "ViT",
        "ForImageClassification",
        PATCHES,
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
        pictures(reduced_size=8),
    ),
    **CLASSIFIERS,
    "vit mae": built(
        "ViTMAE",
        "ForPreTraining",
        {
            **PATCHES,
            "decoder_hidden_size": 12,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 6,
            "decoder_intermediate_size": 18,
        },
        {},
        _masked,
    ),
    "videomae": video_classifier("VideoMAE", {}, frames=16),
    "timesformer": video_classifier("Timesformer", {}, frames=8),
    "vivit": video_classifier("Vivit", {"tubelet_size": [2, 4, 4]}, frames=32),
    "segformer": built(
        "Segformer",
        "ForSemanticSegmentation",
        {**PYRAMID, "sr_ratios": [2, 1], "decoder_hidden_size": 12},
        {},
        _segments,
    ),
    "dpt": built(
        "DPT",
        "ForSemanticSegmentation",
        {
            **TOWER,
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "image_size": 16,
            "patch_size": 4,
            "neck_hidden_sizes": [6, 8, 10, 10],
            "fusion_hidden_size": 6,
            "auxiliary_loss_weight": 0.4,
            "num_labels": 3,
        },
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "backbone_out_indices": [5, 11, 17, 23],
            "neck_hidden_sizes": [256, 512, 1024, 1024],
            "num_labels": 150,
        },
        _labelled(384, 16, 150),
    ),
    "upernet": built(
        "UperNet",
        "ForSemanticSegmentation",
        {
            "backbone_config": {
                "model_type": "swin",
                **WINDOWS,
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "num_heads": [3, 3, 3, 3],
                "embed_dim": 6,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "hidden_size": 6,
            "auxiliary_channels": 6,
            "auxiliary_in_channels": 24,
            "num_labels": 3,
        },
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 512,
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
            "hidden_size": 512,
            "auxiliary_in_channels": 384,
            "num_labels": 150,
        },
        _labelled(512, 64, 150),
    ),
}
