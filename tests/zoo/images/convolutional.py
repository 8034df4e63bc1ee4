"""Convolutional networks as transformers has them."""

import torch

from tests.zoo.building import built, classifier, pictures


def _mobilenet(full=False):
    """The reduced one without most of the blocks that repeat the one before."""
    build = built(
        "MobileNetV2",
        "ForImageClassification",
        {"depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4},
        {},
        pictures(),
    )
    model, batch = build(full)
    if not full:
        blocks = model.mobilenet_v2.layer
        repeats = [block for block in blocks if block.use_residual]
        kept = [block for block in blocks if block not in repeats[1:]]
        model.mobilenet_v2.layer = torch.nn.ModuleList(kept)
    return model, batch


CONVOLUTIONAL = {
    "convnext": built(
        "ConvNext",
        "ForImageClassification",
        {"hidden_sizes": [6, 8, 10, 12], "depths": [1, 2, 1, 1], "drop_path_rate": 0.2},
        {"drop_path_rate": 0.1},
        pictures(),
    ),
    "convnextv2": classifier(
        "ConvNextV2",
        {"hidden_sizes": [6, 8, 10, 12], "depths": [1, 2, 1, 1], "drop_path_rate": 0.2},
    ),
    "regnet": classifier(  # Y, 4 GF
        "RegNet",
        {"embedding_size": 4, "hidden_sizes": [6, 9], "depths": [1, 2], "groups_width": 3},
    ),
    "bit": classifier(  # R50x1
        "Bit",
        {"embedding_size": 6, "hidden_sizes": [16, 24], "depths": [1, 2], "num_groups": 2},
    ),
    "resnet": built(
        "ResNet",
        "ForImageClassification",
        {"embedding_size": 4, "hidden_sizes": [8, 12], "depths": [1, 2]},
        {},
        pictures(),
    ),
    "mobilenet_v2": _mobilenet,
}
