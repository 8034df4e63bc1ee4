"""The networks of the SoyBean paper, every width times `scale`.

Parameters and arithmetic of a layer both go with the product of the widths before and after it, so
with `scale` squared: what a step computes for each byte of gradients stays as it is in the whole
network. The exception is the first convolution, whose three colours do not shrink; it has few of
either. There is no dropout, so that all contestants compute the same losses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classified(nn.Module):
    """`features`, then `classifier`, then the mean cross entropy."""

    def __init__(self, features: nn.Module, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        scores = self.classifier(self.features(inputs).flatten(1))
        return F.cross_entropy(scores, classes)


def alexnet(scale: float) -> Classified:
    """AlexNet as Krizhevsky wrote it down later, in one tower; 61 M parameters at scale 1."""
    a, b, c, d = (_times(width, scale) for width in (64, 192, 384, 256))
    layers: list[nn.Module] = [
        nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, d, 3, padding=1), nn.ReLU(),
        nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    return Classified(nn.Sequential(*layers), _three(36 * d, scale))


def vgg16(scale: float) -> Classified:
    """VGG-16, 138 M parameters at scale 1."""
    layers: list[nn.Module] = []
    inside = 3
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [nn.Conv2d(inside, _times(width, scale), 3, padding=1), nn.ReLU()]
            inside = _times(width, scale)
        layers.append(nn.MaxPool2d(2))
    return Classified(nn.Sequential(*layers), _three(49 * inside, scale))


def mlp(scale: float) -> Classified:
    """Linear layers, 8192 wide at scale 1, each with 67 M parameters."""
    width = _times(8192, scale)
    return Classified(nn.Sequential(nn.Linear(width, width), nn.ReLU()), _three(width, scale, 8192))


def _three(inputs: int, scale: float, width: int = 4096) -> nn.Sequential:
    hidden, classes = _times(width, scale), _times(1000, scale)
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


def _times(width: int, scale: float) -> int:
    return max(4, round(width * scale / 4) * 4)  # so that four devices can split it


MODELS: dict[str, Callable[[float], Classified]] = {"alexnet": alexnet, "vgg16": vgg16, "mlp": mlp}


def made(name: str, scale: float, batch: int) -> tuple[Classified, dict[str, Tensor]]:
    """A network of `MODELS` and a batch, the same ones at each call."""
    torch.manual_seed(0)
    model = MODELS[name](scale)
    first = next(model.parameters())
    shape = (batch, 3, 224, 224) if first.dim() == 4 else (batch, first.shape[1])
    last = model.classifier[-1]
    assert isinstance(last, nn.Linear)
    classes = torch.randint(last.out_features, (batch,))
    return model, {"inputs": torch.randn(shape), "classes": classes}
