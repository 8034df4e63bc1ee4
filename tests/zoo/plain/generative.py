"""Generative models in plain PyTorch: a diffusion transformer and a variational autoencoder."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.batches import classes, images, reals


class DiffusionBlock(nn.Module):
    """Attention and an MLP; the condition shifts, scales and gates both (adaLN)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.second = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c)[:, None].chunk(6, -1)
        x = x + gate * self.attend(self.first(x) * (1 + scale) + shift)
        return x + gate2 * self.mlp(self.second(x) * (1 + scale2) + shift2)

    def attend(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiffusionTransformer(nn.Module):
    """DiT: predicts the noise in latent images of a class, at a time of the diffusion.

    Its last layers start at random, not at zero, under which most gradients would vanish.
    """

    def __init__(self, size, channels, patch, width, layers, heads, num_classes, frequencies=256):
        super().__init__()
        self.patch, self.frequencies = patch, frequencies
        self.stem = nn.Conv2d(channels, width, patch, patch)
        self.register_buffer("positions", _grid(size // patch, width))
        self.times = nn.Sequential(
            nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.classes = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch * channels)

    def forward(self, latents, noise, times, classes):
        kept = torch.cos(times * (math.pi / 2))  # of a cosine schedule
        mixed = kept[:, None, None, None] * latents
        mixed = mixed + (1 - kept * kept).sqrt()[:, None, None, None] * noise
        x = self.stem(mixed).flatten(2).transpose(1, 2) + self.positions  # (B, patches, width)
        c = self.times(_waves(1000 * times, self.frequencies)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.condition(c)[:, None].chunk(2, -1)
        found = self.head(self.norm(x) * (1 + scale) + shift).transpose(1, 2)
        found = F.fold(found, latents.shape[-2:], self.patch, stride=self.patch)
        return F.mse_loss(found, noise)


def _waves(values, count):
    """Cosines and sines of `values` at `count / 2` frequencies."""
    steps = torch.arange(count // 2, device=values.device, dtype=values.dtype)
    angles = values[..., None] * torch.exp(steps * (-math.log(10000) / (count // 2)))
    return torch.cat([angles.cos(), angles.sin()], -1)


def _grid(side, width):
    """Positions in a square of patches: half the channels for rows, half for columns."""
    at = _waves(torch.arange(float(side)), width // 2)
    rows, columns = at[:, None].expand(side, side, -1), at[None].expand(side, side, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)


class VariationalAutoencoder(nn.Module):
    """Convolutions to a Gaussian, a sample of it, convolutions back: the negative ELBO."""

    def __init__(self, size, widths, hidden, latents, beta):
        super().__init__()
        self.beta = beta
        side = size >> len(widths)
        pairs = list(zip([3, *widths], widths, strict=False))
        flat = widths[-1] * side * side
        self.encoder = nn.Sequential(
            *(layer for a, b in pairs for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.ReLU())),
            nn.Flatten(),
            nn.Linear(flat, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * latents),
        )
        self.decoder = nn.Sequential(
            nn.Linear(latents, hidden),
            nn.ReLU(),
            nn.Linear(hidden, flat),
            nn.Unflatten(1, (widths[-1], side, side)),
            *(
                layer
                for a, b in pairs[::-1]
                for layer in (nn.ReLU(), nn.ConvTranspose2d(b, a, 4, 2, 1))
            ),
        )

    def forward(self, images):
        mean, log_variance = self.encoder(images).chunk(2, -1)
        sample = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        again = F.binary_cross_entropy_with_logits(
            self.decoder(sample), images.sigmoid(), reduction="sum"
        )
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        return (again + self.beta * divergence) / len(images)


def diffusion_transformer(published=False):
    """DiT-XL/2 for images of 256 pixels, which are latents of 32."""
    torch.manual_seed(0)
    if published:
        model, size, channels, batch, count = (
            DiffusionTransformer(32, 4, 2, 1152, 28, 16, 1000), 32, 4, 32, 1000
        )  # fmt: skip
    else:
        model, size, channels, batch, count = (
            DiffusionTransformer(6, 3, 2, 24, 2, 3, 7, frequencies=8), 6, 3, 5, 7
        )  # fmt: skip
    shape = batch, channels, size, size
    return model, {
        "latents": reals(*shape),
        "noise": reals(*shape).flip(0),
        "times": reals(batch).sigmoid(),
        "classes": classes(batch, count),
    }


def variational_autoencoder(published=False):
    """beta-VAE as on CelebA."""
    torch.manual_seed(0)
    if published:
        return VariationalAutoencoder(64, [32, 32, 64, 64], 256, 32, 250), {
            "images": images(64, 64)
        }
    return VariationalAutoencoder(8, [5, 6], 9, 3, 4), {"images": images(5, 8)}


GENERATIVE = {"dit": diffusion_transformer, "beta-vae": variational_autoencoder}
