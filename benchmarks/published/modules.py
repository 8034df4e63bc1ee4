"""The models of rows as plain modules: what frameworks compute, one operator a kernel.

Query, key and value share one projection, grouped by heads as in Megatron-LM, so that tensor
parallelism splits it without moving weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-5
ADAPTER_DROPOUT = 0.05  # of an adapter's input, in LitGPT's recipes


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter, which alone is trained (arXiv 2106.09685)."""

    def __init__(self, width: int, out: int, rank: int, *, bias: bool) -> None:
        super().__init__(width, out, bias=bias)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., out)."""
        change: Tensor = self.lora_b(self.lora_a(F.dropout(x, ADAPTER_DROPOUT, self.training)))
        return super().forward(x) + change * 0.5


class JointAdapter(nn.Linear):
    """Queries, keys and values of one projection, with adapters of some, as LitGPT has it."""

    def __init__(
        self, width: int, parts: tuple[int, ...], roles: str, rank: int, *, bias: bool
    ) -> None:
        super().__init__(width, sum(parts), bias=bias)
        self.parts, self.adapted = parts, [roles == "all" or role in roles for role in "qkv"]
        self.lora_a = nn.Linear(width, rank * sum(self.adapted), bias=False)
        self.lora_b = nn.ModuleList(
            nn.Linear(rank, part, bias=False)
            for part, adapted in zip(parts, self.adapted, strict=True)
            if adapted
        )
        places = torch.arange(sum(parts)).split(parts)
        adapted = [one for one, has in zip(places, self.adapted, strict=True) if has]
        self.places: Tensor
        self.register_buffer("places", torch.cat(adapted), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., sum of the parts)."""
        made = super().forward(x)
        inner = self.lora_a(F.dropout(x, ADAPTER_DROPOUT, self.training))
        given = zip(self.lora_b, inner.chunk(len(self.lora_b), dim=-1), strict=True)
        change = torch.cat([layer(own) for layer, own in given], dim=-1)
        if not all(self.adapted):  # `index_copy` keeps its source for the backward pass
            change = torch.zeros_like(made).index_copy(-1, self.places, change)
        return made + change * 0.5


@dataclass(frozen=True, slots=True)
class Linears:
    """Makes the linear layers of a model: those of some roles have adapters of a rank.

    `roles` is "qv" for queries and values, "all", or empty for none. `joint` says that queries,
    keys and values are one projection.
    """

    roles: str = ""
    rank: int = 0
    joint: bool = False

    def __call__(self, role: str, width: int, out: int, *, bias: bool = False) -> nn.Linear:
        if self.roles == "all":
            return Adapted(width, out, self.rank, bias=bias)
        return nn.Linear(width, out, bias=bias)

    def of_attention(self, width: int, parts: tuple[int, ...], *, bias: bool) -> nn.Module:
        """Of (..., width) the queries, keys and values, side by side or each for itself."""
        if self.roles:
            return JointAdapter(width, parts, self.roles, self.rank, bias=bias)
        if self.joint:
            return nn.Linear(width, sum(parts), bias=bias)
        return Separate(width, parts, bias=bias)


class Separate(nn.Module):
    """Queries, keys and values by a projection each."""

    def __init__(self, width: int, parts: tuple[int, ...], *, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, part, bias=bias) for part in parts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., width) -> one tensor for each part."""
        return self.q(x), self.k(x), self.v(x)


def freeze(model: nn.Module) -> None:
    """Train adapters alone, if there are any."""
    if any(isinstance(module, Adapted | JointAdapter) for module in model.modules()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)


class Attention(nn.Module):
    """Causal attention; with a mask its scores are stored, as in Megatron-LM of 2023."""

    def __init__(self, hidden: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, hidden) -> the same; `mask` is added to the scores."""
        batch, tokens, hidden = x.shape
        each = self.qkv(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        q, k, v = each.chunk(3, dim=-1)
        if mask is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) + mask
            weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
            out = torch.matmul(weights, v)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, tokens, hidden))
        return projected


class GptBlock(nn.Module):
    """A block of GPT-2: norms before attention and MLP, GELU."""

    def __init__(self, hidden: int, heads: int, ffn: int, *, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(hidden, NORM_EPS)
        self.attention = Attention(hidden, heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(hidden, NORM_EPS)
        self.up = nn.Linear(hidden, ffn)
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        x = x + F.dropout(self.attention(self.norm1(x), mask), self.dropout, self.training)
        inner = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + F.dropout(self.down(inner), self.dropout, self.training)


class Gpt(nn.Module):
    """GPT-2 with its loss."""

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        vocab: int,
        tokens: int,
        *,
        tied: bool,
        fused: bool,
        wide_loss: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.fused, self.wide_loss, self.dropout = fused, wide_loss, dropout
        self.tokens = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(tokens, hidden)
        self.blocks = nn.ModuleList(
            GptBlock(hidden, heads, ffn, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden, NORM_EPS)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of (batch, tokens)."""
        x = self.tokens(input_ids) + self.positions.weight
        x = F.dropout(x, self.dropout, self.training)
        mask = None
        if not self.fused:
            count = input_ids.shape[1]
            mask = torch.full((count, count), -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return loss_of(self.head(self.norm(x)), labels, wide=self.wide_loss)


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions; several queries share a key and a value.

    With `fused` kernels for both, keys and values are not repeated (see `turned_at_once`).
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        linear: Linears,
        *,
        bias: bool = False,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.fused = fused
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.parts = (hidden, kv_heads * self.width, kv_heads * self.width)
        self.qkv = linear.of_attention(hidden, self.parts, bias=bias)
        self.proj = linear("proj", hidden, hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        batch, tokens, hidden = x.shape

        def by_head(wide: Tensor, heads: int) -> Tensor:
            return wide.view(batch, tokens, heads, self.width).transpose(1, 2)

        made = self.qkv(x)
        query, key, value = made.split(self.parts, dim=-1) if isinstance(made, Tensor) else made
        turn = turned_at_once if self.fused else rotated
        q = turn(by_head(query, self.heads), cos, sin)
        k = turn(by_head(key, self.kv_heads), cos, sin)
        v = by_head(value, self.kv_heads)
        if not self.fused:
            k, v = self._repeated(k), self._repeated(v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.fused)
        projected: Tensor = self.proj(out.transpose(1, 2).reshape(batch, tokens, hidden))
        return projected

    def _repeated(self, x: Tensor) -> Tensor:
        """A key or value for each query that shares it."""
        each = self.heads // self.kv_heads
        if each == 1:
            return x
        batch, heads, tokens, width = x.shape
        return x[:, :, None].expand(batch, heads, each, tokens, width).flatten(1, 2)


class ComposedNorm(nn.Module):
    """An RMS norm of single operators in float32, as torch ran it before it had a kernel for it."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class WideNorm(ComposedNorm):
    """As LitGPT has it: the weight, too, is multiplied in float32."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> the same."""
        wide = x.float()
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.float()).to(x.dtype)


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, rotary positions, SwiGLU."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        norm: type[nn.Module],
        linear: Linears,
        *,
        fused: bool,
    ) -> None:
        super().__init__()
        self.norm1 = norm(hidden, NORM_EPS)
        self.attention = GroupedAttention(hidden, heads, kv_heads, linear, fused=fused)
        self.gated = gated_at_once if fused else swiglu
        self.norm2 = norm(hidden, NORM_EPS)
        self.gate = linear("mlp", hidden, ffn)
        self.up = linear("mlp", hidden, ffn)
        self.down = linear("mlp", ffn, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        x = x + self.attention(self.norm1(x), cos, sin)
        inner = self.norm2(x)
        out: Tensor = x + self.down(self.gated(self.gate(inner), self.up(inner)))
        return out


class NeoxBlock(nn.Module):
    """A block of GPT-NeoX: attention and a plain MLP read the same input; some share its norm."""

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, ffn: int, linear: Linears, *, shared: bool
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, NORM_EPS)
        self.norm2 = None if shared else nn.LayerNorm(hidden, NORM_EPS)
        self.attention = GroupedAttention(hidden, heads, kv_heads, linear, bias=True)
        self.up = linear("mlp", hidden, ffn, bias=True)
        self.down = linear("mlp", ffn, hidden, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, tokens, hidden) -> the same."""
        inner = self.norm1(x)
        attended = self.attention(inner, cos, sin)
        if self.norm2 is not None:
            inner = self.norm2(x)
        out: Tensor = self.down(F.gelu(self.up(inner))) + (attended + x)
        return out


class Llama(nn.Module):
    """Llama with its loss, or with `neox` a GPT-NeoX, whose blocks may have one `shared` norm.

    With `fused` kernels rotary positions, SwiGLU and grouped attention are one kernel each.
    With `loss_part` norms and loss are LitGPT's (`WideNorm`, `loss_in_parts`).
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        vocab: int,
        *,
        tied: bool,
        composed_norms: bool,
        wide_loss: bool,
        linear: Linears,
        neox: bool = False,
        shared: bool = False,
        fused: bool = False,
        loss_part: int = 0,
    ) -> None:
        super().__init__()
        self.wide_loss, self.loss_part = wide_loss, loss_part
        rms: type[nn.Module] = nn.RMSNorm
        if composed_norms:
            rms = WideNorm if loss_part else ComposedNorm
        self.width = hidden // heads
        self.tokens = nn.Embedding(vocab, hidden)
        sizes = hidden, heads, kv_heads, ffn
        self.blocks = nn.ModuleList(
            NeoxBlock(*sizes, linear, shared=shared)
            if neox
            else LlamaBlock(*sizes, rms, linear, fused=fused)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden, NORM_EPS) if neox else rms(hidden, NORM_EPS)
        self.head = linear("head", hidden, vocab)
        if tied:
            self.head.weight = self.tokens.weight
        freeze(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of (batch, tokens)."""
        x = self.tokens(input_ids)
        cos, sin = rotary(input_ids, self.width)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.loss_part:
            return loss_in_parts(self.head, self.norm(x), labels, self.loss_part)
        return loss_of(self.head(self.norm(x)), labels, wide=self.wide_loss)


def rotary(input_ids: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions of (batch, tokens): (tokens, width) each."""
    places = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.float32)
    halves = torch.arange(0, width, 2, device=input_ids.device, dtype=torch.float32)
    angles = torch.outer(places, 10000.0 ** (-halves / width))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in float32, as Llama's own code and its descendants compute them."""
    wide = x.float()
    low, high = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def turned_at_once(x: Tensor, cos: Tensor, _sin: Tensor) -> Tensor:
    """As much work as rotary positions by one kernel, which torch does not have.

    In each pass `x` is read and the result written once, and only the angles are kept.
    """
    return x * cos.to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation of Llama's MLP, by two kernels."""
    return F.silu(gate) * up


def gated_at_once(gate: Tensor, up: Tensor) -> Tensor:
    """As much work as `swiglu` by one kernel, which torch does not have.

    Both operands are read and kept; the backward pass writes the gradient of each.
    """
    return gate * up


def loss_of(logits: Tensor, labels: Tensor, *, wide: bool) -> Tensor:
    """The mean cross entropy, of logits in float32 where it is `wide`."""
    return F.cross_entropy((logits.float() if wide else logits).flatten(0, 1), labels.flatten())


def loss_in_parts(head: nn.Module, x: Tensor, labels: Tensor, positions: int) -> Tensor:
    """The mean cross entropy as LitGPT computes it: of logits in float32, by parts of the sequence.

    Where weights are frozen, the head makes the logits of a part; else those of all are divided.
    """
    if head.weight.requires_grad:
        logits = head(x).float()[:, :-1].split(positions, dim=1)
        labels = labels[:, 1:]
    else:
        logits = [head(part).float() for part in x.split(positions, dim=1)]
    total = torch.zeros((), device=x.device)
    for part, target in zip(logits, labels.split(positions, dim=1), strict=True):
        total = total + F.cross_entropy(part.flatten(0, 1), target.flatten(), reduction="sum")
    return total / labels.numel()
