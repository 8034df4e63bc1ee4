"""Mixtures of experts of rows as plain modules: what frameworks compute, one operator a kernel.

Experts are grouped products over rows that are sorted by expert, as in Megatron-LM with
TransformerEngine; routing is balanced there (`moe_router_force_load_balancing` of its recipes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.modules import NORM_EPS, gated_at_once, loss_of, rotary, turned_at_once


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V3, arXiv 2412.19437, section 4.2).

    Attributes:
        query: compressed width of queries.
        key_value: compressed width of keys and values.
        plain: width of a head's queries and keys without positions.
        turned: of the part with rotary positions, whose key all heads share.
        value: width of a head's values.
    """

    query: int = 1536
    key_value: int = 512
    plain: int = 128
    turned: int = 64
    value: int = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """A mixture's sizes; see `Row`. `dense` layers of inner width `dense_ffn` come first."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    experts: int
    chosen: int
    shared_ffn: int = 0
    dense: int = 0
    dense_ffn: int = 0
    latent: Latent | None = None
    predicted: int = 1  # tokens that are predicted: more than one by layers of their own


class Experts(nn.Module):
    """Of each token the `chosen` of `experts` gated MLPs with the highest scores, by these."""

    def __init__(self, hidden: int, ffn: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, 2 * ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        rows = x.flatten(0, -2)
        likely = torch.softmax(self.router(rows).float(), dim=-1)
        scores, chosen = torch.topk(likely, self.chosen, dim=-1)
        scores = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        expert, order = torch.sort(chosen.flatten())
        counts = torch.histc(expert.float(), self.experts, 0, self.experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows[order // self.chosen], self.up, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        out = out * scores.flatten()[order].unsqueeze(-1)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.shape[0], device=order.device)
        return out[place].view(-1, self.chosen, rows.shape[-1]).sum(1).view(x.shape)


class Gated(nn.Module):
    """A SwiGLU MLP, whose first two matrices are one."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same."""
        gate, up = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(gated_at_once(gate, up))
        return out


class NormedAttention(nn.Module):
    """Grouped causal attention with norms of each query and key, as in Qwen3."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.q = nn.Linear(hidden, heads * width, bias=False)
        self.k = nn.Linear(hidden, kv_heads * width, bias=False)
        self.v = nn.Linear(hidden, kv_heads * width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(width, NORM_EPS), nn.RMSNorm(width, NORM_EPS)
        self.proj = nn.Linear(heads * width, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        batch, tokens, _ = x.shape

        def by_head(wide: Tensor, heads: int) -> Tensor:
            return wide.view(batch, tokens, heads, self.width)

        q = self.q_norm(by_head(self.q(x), self.heads)).transpose(1, 2)
        k = self.k_norm(by_head(self.k(x), self.kv_heads)).transpose(1, 2)
        v = by_head(self.v(x), self.kv_heads).transpose(1, 2)
        q, k = turned_at_once(q, cos, sin), turned_at_once(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class LatentUp(nn.Module):
    """Queries, keys and values of all heads from their compressed forms."""

    def __init__(self, heads: int, sizes: Latent) -> None:
        super().__init__()
        self.heads, self.sizes = heads, sizes
        self.q = nn.Linear(sizes.query, heads * (sizes.plain + sizes.turned), bias=False)
        self.kv = nn.Linear(sizes.key_value, heads * (sizes.plain + sizes.value), bias=False)

    def forward(
        self, q: Tensor, kv: Tensor, turned: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, compressed width) of each -> (batch, heads, tokens, width) of each."""
        sizes = self.sizes

        def by_head(wide: Tensor, heads: int) -> Tensor:
            split: Tensor = wide.unflatten(-1, (heads, -1))
            return split.transpose(1, 2)

        q_plain, q_turned = by_head(self.q(q), self.heads).split(
            [sizes.plain, sizes.turned], dim=-1
        )
        k_plain, v = by_head(self.kv(kv), self.heads).split([sizes.plain, sizes.value], dim=-1)
        k_turned = turned_at_once(by_head(turned, 1), cos, sin).expand(-1, self.heads, -1, -1)
        queries = torch.cat((q_plain, turned_at_once(q_turned, cos, sin)), dim=-1)
        return queries, torch.cat((k_plain, k_turned), dim=-1), v


class LatentAttention(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, hidden: int, heads: int, sizes: Latent) -> None:
        super().__init__()
        self.widths = [sizes.key_value, sizes.turned]
        self.q = nn.Linear(hidden, sizes.query, bias=False)
        self.q_norm = nn.RMSNorm(sizes.query, NORM_EPS)
        self.kv = nn.Linear(hidden, sum(self.widths), bias=False)
        self.kv_norm = nn.RMSNorm(sizes.key_value, NORM_EPS)
        self.up = LatentUp(heads, sizes)
        self.proj = nn.Linear(heads * sizes.value, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        packed, turned = self.kv(x).split(self.widths, dim=-1)
        q, k, v = self.up(self.q_norm(self.q(x)), self.kv_norm(packed), turned, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return projected


class MixtureBlock(nn.Module):
    """A block: RMS norms, attention, and experts or, in the first blocks, an MLP."""

    def __init__(self, sizes: Sizes, *, dense: bool) -> None:
        super().__init__()
        hidden, latent = sizes.hidden, sizes.latent
        self.norm1, self.norm2 = nn.RMSNorm(hidden, NORM_EPS), nn.RMSNorm(hidden, NORM_EPS)
        self.attention = (
            NormedAttention(hidden, sizes.heads, sizes.kv_heads, sizes.head_size)
            if latent is None
            else LatentAttention(hidden, sizes.heads, latent)
        )
        self.mlp = (
            Gated(hidden, sizes.dense_ffn)
            if dense
            else Experts(hidden, sizes.ffn, sizes.experts, sizes.chosen)
        )
        self.shared = None if dense or not sizes.shared_ffn else Gated(hidden, sizes.shared_ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        x = x + self.attention(self.norm1(x), cos, sin)
        inner = self.norm2(x)
        out: Tensor = x + self.mlp(inner)
        return out if self.shared is None else out + self.shared(inner)


class NextToken(nn.Module):
    """A layer that predicts one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(sizes.hidden, NORM_EPS) for _ in range(2))
        self.join = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.block = MixtureBlock(sizes, dense=False)
        self.norm = nn.RMSNorm(sizes.hidden, NORM_EPS)

    def forward(
        self, x: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of (batch, tokens, hidden) of the layer before, and embeddings: the same, and normed."""
        both = torch.cat((self.norm1(x), self.norm2(embedded)), dim=-1)
        out: Tensor = self.block(self.join(both), cos, sin)
        return out, self.norm(out)


class Mixture(nn.Module):
    """A language model of such blocks with its loss; embedding and head are not tied."""

    def __init__(self, sizes: Sizes, *, wide_loss: bool) -> None:
        super().__init__()
        self.wide_loss = wide_loss
        latent = sizes.latent
        self.turned = sizes.head_size if latent is None else latent.turned
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(
            MixtureBlock(sizes, dense=i < sizes.dense) for i in range(sizes.layers)
        )
        self.further = nn.ModuleList(NextToken(sizes) for _ in range(sizes.predicted - 1))
        self.norm = nn.RMSNorm(sizes.hidden, NORM_EPS)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of (batch, tokens), summed over the tokens that are predicted."""
        embedded = x = self.tokens(input_ids)
        cos, sin = rotary(input_ids, self.turned)
        for block in self.blocks:
            x = block(x, cos, sin)
        loss = self._loss(self.norm(x), labels)
        for layer in self.further:
            x, normed = layer(x, embedded, cos, sin)
            loss = loss + self._loss(normed, labels)
        return loss

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.head(x), labels, wide=self.wide_loss)
