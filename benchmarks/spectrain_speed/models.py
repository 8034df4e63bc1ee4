"""A VGG-16 for small images, with its big linear layers, and a transformer of bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.spectrain_accuracy.subjects import LENGTH, VOCABULARY, Transformer

_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions, then a pool
_HIDDEN, _CLASSES, _SIDE = 4096, 10, 32


class VGG16(nn.Module):
    """Thirteen convolutions and three linear layers, for images of 32 x 32; without dropout."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for channels, count in _BLOCKS:
            for _ in range(count):
                layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU()]
                width = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(width, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _HIDDEN),
            nn.ReLU(),
            nn.Linear(_HIDDEN, _CLASSES),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x).flatten(1)), y)


def made(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model called `name` and a batch for it, alike on every host."""
    torch.manual_seed(0)
    if name == "vgg16":
        images = torch.randn(batch, 3, _SIDE, _SIDE)
        return VGG16(), (images, torch.randint(_CLASSES, (batch,)))
    text = torch.randint(VOCABULARY, (batch, LENGTH + 1))
    model = Transformer(width=256, heads=8, layers=8)
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous())
