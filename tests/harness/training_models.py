"""Small models that training scripts of many kinds train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, inputs=8, outputs=4):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 16), nn.Linear(16, outputs)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.policy, self.value = MLP(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x, action, returns):
        hidden = self.body(x)
        chance = F.log_softmax(self.policy(hidden), -1)
        value = self.value(hidden).squeeze(-1)
        advantage = (returns - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        chosen = chance.gather(1, action.unsqueeze(1)).squeeze(1)
        entropy = -(chance.exp() * chance).sum(-1).mean()
        return -(chosen * advantage).mean() + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy


class Contrastive(nn.Module):
    """MoCo's queue of negatives, in a buffer; the keys' encoder is the caller's."""

    def __init__(self):
        super().__init__()
        self.encoder = MLP()
        self.register_buffer("queue", F.normalize(torch.randn(4, 32), dim=0))

    def forward(self, x, keys):
        query = F.normalize(self.encoder(x), dim=1)
        positive = (query * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[:, keys.shape[0] :], keys.T], 1))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Language(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        hidden = self.norm(torch.tanh(self.layer(self.embedding(ids))))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        batch, length, width = x.shape
        heads = [
            t.view(batch, length, 2, 4).transpose(1, 2) for t in self.qkv(x).split(width, dim=2)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)).square().mean()


class Warmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = MLP()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        return self.body(x).square().mean() * torch.clamp(self.steps.double() / 3, max=1.0)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = MLP()

    def forward(self, x, y, mask):
        loss = (self.body(x) - y).abs().mean(-1)
        return (loss * mask).sum() / mask.sum()


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = MLP(), MLP(4, 8)
        self.codes = nn.Parameter(torch.randn(16, 4))

    def forward(self, x):
        z = self.encoder(x)
        code = self.codes[torch.cdist(z, self.codes).argmin(1)]
        through = z + (code - z).detach()
        commitment = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decoder(through), x) + commitment


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.label, self.domain = MLP(8, 8), nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x, label, domain):
        hidden = self.body(x)
        other = self.domain(_Reversed.apply(hidden, 0.5))
        return F.cross_entropy(self.label(hidden), label) + F.cross_entropy(other, domain)


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.layer(x))).mean((2, 3)))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return (self.base(x) + x @ self.a.T @ self.b.T).square().mean()


class Normalised(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.out = how(nn.Linear(8, 8)), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.relu(self.layer(x))).mean()


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = MLP(), MLP().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return F.kl_div(F.log_softmax(self.student(x), -1), target, reduction="batchmean")


class Focal(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = MLP()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5, 3.0]))

    def forward(self, x, y):
        scores = self.body(x)
        options = {"weight": self.weight, "label_smoothing": 0.1}
        each = F.cross_entropy(scores, y, **options, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean() + F.cross_entropy(scores, y, **options)


class StateSpace(nn.Module):
    """A convolution whose kernel is made of complex numbers, as of S4D."""

    def __init__(self):
        super().__init__()
        self.decay, self.frequency = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.out = nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        poles = torch.complex(-self.decay.exp(), self.frequency)
        powers = torch.exp(poles[:, None] * torch.arange(x.shape[1], dtype=x.dtype))
        kernel = (torch.view_as_complex(self.out).conj()[:, None] * powers).real.sum(0)
        both = torch.fft.rfft(x, n=16) * torch.fft.rfft(kernel, n=16)
        return torch.fft.irfft(both, n=16)[:, : x.shape[1]].square().mean()
