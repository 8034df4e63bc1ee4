"""Models in plain PyTorch: recurrent, mixing and U-shaped ones."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.batches import classes, images, integers, tokens


class LanguageLSTM(nn.Module):
    """Embedding, stacked LSTM with dropout between its layers, projection, loss."""

    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids, labels):
        hidden, _ = self.lstm(self.embedding(input_ids))  # (B, T, D)
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())


class ResidualLSTM(nn.Module):
    """LSTM layers with skips around them, and a classifier of the last step."""

    def __init__(self, vocabulary, width, layers, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids.t())  # (T, B, D)
        for layer in self.layers:
            x = x + layer(x)[0]
        return F.cross_entropy(self.head(self.norm(x[-1])), labels)


class MixerBlock(nn.Module):
    """Mixes over patches, then over channels."""

    def __init__(self, patches, width, over_patches, over_channels):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.patches = _mlp(patches, over_patches)
        self.channels = _mlp(width, over_channels)

    def forward(self, x):
        x = x + self.patches(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


def _mlp(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class Mixer(nn.Module):
    """MLP-Mixer with its loss."""

    def __init__(self, image, patch, width, over_patches, over_channels, layers, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        patches = (image // patch) ** 2
        self.blocks = nn.Sequential(
            *(MixerBlock(patches, width, over_patches, over_channels) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images, classes):
        x = self.stem(images).flatten(2).transpose(1, 2)  # (B, patches, width)
        return F.cross_entropy(self.head(self.norm(self.blocks(x)).mean(1)), classes)


class UNet(nn.Module):
    """A U-Net with skips: down by pooling, up by transposed convolutions, a loss per pixel."""

    def __init__(self, widths, num_classes):
        super().__init__()
        self.down = nn.ModuleList(
            _double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ups)
        self.join = nn.ModuleList(_double(2 * b, b) for _, b in ups)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images, classes):
        x, skips = images, []
        for stage in self.down:
            skips.append(x := stage(x if not skips else F.max_pool2d(x, 2)))
        for up, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], dim=1))
        return F.cross_entropy(self.head(x), classes)


def _double(inside, outside):
    return nn.Sequential(
        *_normed(inside, outside, nn.BatchNorm2d(outside)),
        *_normed(outside, outside, nn.GroupNorm(2, outside)),
    )


def _normed(inside, outside, norm):
    return nn.Conv2d(inside, outside, 3, padding=1, bias=False), norm, nn.ReLU(inplace=True)


def language_lstm(published=False):
    torch.manual_seed(0)
    if published:
        return LanguageLSTM(33278, 1500, 2), tokens(64, 35, 33278)
    return LanguageLSTM(37, 12, 2), tokens(5, 7, 37)


def residual_lstm(published=False):
    torch.manual_seed(0)
    vocabulary, width, batch, length = (30000, 512, 64, 100) if published else (37, 12, 5, 6)
    model = ResidualLSTM(vocabulary, width, 8 if published else 3, 4)
    return model, {"input_ids": integers(vocabulary, batch, length), "labels": classes(batch, 4)}


def mixer(published=False):
    torch.manual_seed(0)
    if published:
        model = Mixer(224, 16, 768, 384, 3072, 12, 1000)
        return model, {"images": images(64, 224), "classes": classes(64, 1000)}
    return Mixer(8, 4, 12, 7, 18, 2, 5), {"images": images(5, 8), "classes": classes(5, 5)}


def unet(published=False):
    torch.manual_seed(0)
    if published:
        model = UNet([64, 128, 256, 512, 1024], 21)
        return model, {"images": images(16, 256), "classes": integers(21, 16, 256, 256)}
    return UNet([4, 6, 8], 3), {"images": images(5, 8), "classes": integers(3, 5, 8, 8)}


NETWORKS = {
    "lstm lm": language_lstm,
    "residual lstm": residual_lstm,
    "mlp-mixer": mixer,
    "u-net": unet,
}
