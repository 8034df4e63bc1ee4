"""Two language models of bytes and a network for digits, with their data; no downloads.

The text is the source of Python's own standard library, the digits are
scikit-learn's. What is evaluated on is never trained on.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
VOCABULARY, LENGTH, HELD_OUT = 256, 32, 8  # byte values, bytes a sample, batches to evaluate on


class Transformer(nn.Module):
    """Four pre-norm blocks over bytes, causal."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.projects = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x) + self.places  # (batch, time, width)
        for i, mix in enumerate(self.mixes):
            mixed = mix(self.norms[2 * i](h)).unflatten(-1, (3, self.heads, -1))
            q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, time, width / heads)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + self.projects[i](a.transpose(1, 2).flatten(2))
            h = h + self.downs[i](F.gelu(self.ups[i](self.norms[2 * i + 1](h))))
        return F.cross_entropy(self.head(self.norms[-1](h)).flatten(0, 1), y.flatten())


class ResidualLSTM(nn.Module):
    """Four LSTM layers over bytes, each adding to what goes in."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers + 1))
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for i, layer in enumerate(self.layers):
            h = h + layer(self.norms[i](h))[0]
        return F.cross_entropy(self.head(self.norms[-1](h)).flatten(0, 1), y.flatten())


class DigitsCNN(nn.Module):
    """Five convolutions and three linear layers on 8 x 8 images, plain as VGG."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        sizes = (1, channels, channels, 2 * channels, 2 * channels, 2 * channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.hidden = nn.ModuleList([nn.Linear(32 * 4, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 10)
        for layer in (*self.convolutions, *self.hidden):  # the default dies out in eight layers
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def scores(self, images: Tensor) -> Tensor:
        h = images
        for i, convolution in enumerate(self.convolutions):
            h = F.relu(convolution(h))
            if i in (1, 3):
                h = F.max_pool2d(h, 2)
        h = h.flatten(1)
        for layer in self.hidden:
            h = F.relu(layer(h))
        scores: Tensor = self.head(h)
        return scores

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(images), digits)


@dataclass(frozen=True)
class Subject:
    """A model, its batches by seed and step, and the learning rates that suit plain training."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    held_out: Callable[[], list[Batch]]
    rates: dict[str, float]


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Bytes to train on and to evaluate on: every tenth file is held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    parts = [b"".join(f.read_bytes() for f in files if f not in files[::10])]
    parts.append(b"".join(f.read_bytes() for f in files[::10]))
    train, test = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, test


def _windows(text: Tensor, seed: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH - 1, (size, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@cache
def _digits() -> tuple[Batch, Batch]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(found.target)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, digits = images[order], digits[order]
    return (images[:1500], digits[:1500]), (images[1500:], digits[1500:])


def _digit_batch(seed: int, step: int) -> Batch:
    images, digits = _digits()[0]
    chosen = torch.randint(
        len(digits), (32,), generator=torch.Generator().manual_seed(seed * 10_000 + step)
    )
    return images[chosen], digits[chosen]


def _digit_tests() -> list[Batch]:
    images, digits = _digits()[1]
    return [(images[i : i + 32], digits[i : i + 32]) for i in range(0, 32 * 9, 32)]


def _text_batch(seed: int, step: int) -> Batch:
    return _windows(_text()[0], seed * 10_000 + step, 16)


def _text_tests() -> list[Batch]:
    return [_windows(_text()[1], 1_000_000 + i, 16) for i in range(HELD_OUT)]


SUBJECTS = {
    "transformer": Subject(Transformer, _text_batch, _text_tests, {"momentum": 0.1, "adamw": 3e-3}),
    "lstm": Subject(ResidualLSTM, _text_batch, _text_tests, {"momentum": 0.3, "adamw": 5e-3}),
    "digits": Subject(DigitsCNN, _digit_batch, _digit_tests, {"momentum": 0.02, "adamw": 2e-3}),
}
