"""Random small modules: programs of operators, views, in-place changes, buffers, shared weights.

A program is a tuple of steps; a step names an operator, the values that it reads, and a number
that decides its dimension, size or constant. Every program is a module that eager mode runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

SHAPE = (4, 6, 8)  # of the input: samples, tokens, features
_MOST_ELEMENTS = 4000
_MOST_STEPS = 9


class Step(NamedTuple):
    """An operator, positions of the values it reads counted from the last one, and a number."""

    op: str
    a: int
    b: int
    k: int


class OfProgram(nn.Module):
    """The module of a program; parameters are made when it is."""

    def __init__(self, program: tuple[Step, ...]) -> None:
        super().__init__()
        self.program, self.making = program, True
        self.weights = nn.ParameterDict()
        self.norms = nn.ModuleDict()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.generator = torch.Generator().manual_seed(len(program))
        self.double()
        with torch.no_grad():
            self(torch.randn(SHAPE, generator=self.generator, dtype=torch.float64))
        for norm in self.norms.values():
            norm.reset_running_stats()
        self.calls.zero_()
        self.making = False
        del self.generator

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        """A parameter; the same for equal names and shapes."""
        key = f"{name}_{'x'.join(map(str, shape))}"
        if self.making and key not in self.weights:
            drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
            self.weights[key] = nn.Parameter(drawn * 0.3)
        return self.weights[key]

    def norm(self, features: int) -> nn.Module:
        """A batch norm of so many features."""
        if self.making and str(features) not in self.norms:
            self.norms[str(features)] = nn.BatchNorm1d(features).double()
        return self.norms[str(features)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss: a weighted sum of the last values."""
        values = [x * self.weight("scale", x.shape[-1])]
        for step in self.program:
            a = values[-1 - step.a % len(values)]
            b = values[-1 - step.b % len(values)]
            found = OPS[step.op](self, a, b, step.k)
            if 0 < found.numel() <= _MOST_ELEMENTS:
                values.append(found)
        loss = x.new_zeros(())
        for number, value in enumerate(values[-3:]):
            loss = loss + (value * self.weight(f"out{number}", *value.shape[-1:])).sum()
        return loss / x.shape[0]


def _dim(x: torch.Tensor, k: int) -> int:
    return k % max(1, x.dim())


def _like(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """`b` in a shape that goes with `a`."""
    try:
        if torch.broadcast_shapes(a.shape, b.shape) == a.shape:
            return b
    except RuntimeError:
        pass
    return b.mean()


def _rows(a: torch.Tensor) -> torch.Tensor:
    """`a` with three dimensions."""
    while a.dim() < 3:
        a = a.unsqueeze(0)
    return a.flatten(0, a.dim() - 3)


def _attention(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    a = _rows(a)
    heads = 2 if a.shape[-1] % 2 == 0 else 1
    n, s, f = a.shape
    q = (a @ m.weight("q", f, f)).view(n, s, heads, f // heads).transpose(1, 2)
    v = a.view(n, s, heads, f // heads).transpose(1, 2)
    found = F.scaled_dot_product_attention(q, v, v, is_causal=bool(k % 2))
    return found.transpose(1, 2).reshape(n, s, f)


def _explicit_attention(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    a = _rows(a)
    scores = (a @ m.weight("k", a.shape[-1], a.shape[-1])) @ a.transpose(-1, -2)
    if k % 2:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=a.device).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ a


def _conv(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    a = _rows(a)
    return F.conv1d(a, m.weight("conv", 4, a.shape[1], 3), m.weight("cb", 4), padding=k % 3)


def _batch_norm(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    a = _rows(a)
    return m.norm(a.shape[1])(a)


def _in_place_slice(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    found = a.clone()
    view = found.select(_dim(a, k), 0) if a.dim() else found
    view.mul_(2.0).add_(1.0)
    return found


def _assign(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    found = a * 1.0
    if a.dim():
        found[..., k % a.shape[-1]] = b.mean()
    return found


def _counted(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    m.calls += 1
    return a * (1.0 if k % 2 else 0.5)


def _gather(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    return a.gather(_dim(a, k), a.detach().argsort(_dim(a, k))) if a.dim() else a


def _embedded(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    ids = a.detach().abs().mul(3).long().clamp(max=6)
    return F.embedding(ids.flatten(0, -2)[..., 0] if a.dim() > 1 else ids, m.weight("table", 7, 4))


def _unfolded(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    d = _dim(a, k)
    return a.unflatten(d, (2, -1)) if a.dim() and a.shape[d] % 2 == 0 and a.dim() < 5 else a


def _cat(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    return torch.cat([a, a * _like(b, a)], _dim(a, k)) if a.dim() else a


def _halves(m: OfProgram, a: torch.Tensor, b: torch.Tensor, k: int) -> torch.Tensor:
    parts = a.chunk(2, _dim(a, k)) if a.dim() else (a,)
    return parts[0] * parts[-1].sigmoid() if parts[0].shape == parts[-1].shape else parts[0]


Op = Callable[[OfProgram, torch.Tensor, torch.Tensor, int], torch.Tensor]

_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: x.clamp(max=2.0).exp(),
    "sin": torch.sin,
    "cos": torch.cos,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": lambda x: x.clamp(-3, 3).square(),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "softplus": F.softplus,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "erf": torch.erf,
    "log1p": lambda x: x.abs().log1p(),
    "reciprocal": lambda x: (x * x + 1).reciprocal(),
    "detach": lambda x: x.detach() + x,
    "sign": lambda x: x * x.detach().sign(),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.transpose(0, -1) if x.dim() else x,
    "contiguous": lambda x: x.transpose(0, -1).contiguous() if x.dim() else x,
    "outer": lambda x: x.flatten()[:6].outer(x.flatten()[-5:]),
    "in_place_relu": lambda x: (x * 1.0).relu_(),
    "in_place_fill": lambda x: (x * 1.0).masked_fill_(x.detach() > 0.5, 0.1),
    "diagonal": lambda x: x.diagonal(dim1=-2, dim2=-1) if x.dim() > 1 else x,
    "triu": lambda x: x.triu() if x.dim() > 1 else x,
}
_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b * b + 1),
    "maximum": lambda a, b: torch.maximum(a, b + 0.1),
    "minimum": lambda a, b: torch.minimum(a, b - 0.1),
    "where": lambda a, b: torch.where(a.detach() > 0.1, a, b.expand_as(a)),
    "atan2": lambda a, b: torch.atan2(a, b + 3),
    "lerp": lambda a, b: a.lerp(b.expand_as(a), 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b.expand_as(a), value=0.5),
    "in_place_add": lambda a, b: (a * 1.0).add_(b, alpha=2),
}
_ALONG: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "sum_kept": lambda x, d: x.sum(d, keepdim=True).expand_as(x),
    "mean": lambda x, d: x.mean(d),
    # Half of the mean, because sums that are zero have no digits to compare.
    "centred": lambda x, d: x - x.mean(d, keepdim=True) / 2,
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d),
    "var": lambda x, d: x.var(d, correction=0),
    "std": lambda x, d: (x.var(d, correction=0) + 1).sqrt(),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "norm": lambda x, d: (x.square().sum(d) + 1).sqrt(),
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(1, d),
    "unsqueeze": lambda x, d: x.unsqueeze(d) if x.dim() < 5 else x,
    "squeeze": lambda x, d: x.squeeze(d),
    "narrow": lambda x, d: x.narrow(d, 0, max(1, x.shape[d] - 1)),
    "stride": lambda x, d: x.transpose(0, d)[::2].transpose(0, d),
    "select": lambda x, d: x.select(d, -1),
    "repeat": lambda x, d: x.repeat_interleave(2, d),
    "stack": lambda x, d: torch.stack([x, x.sin()], d) if x.dim() < 5 else x,
    "moved": lambda x, d: x.movedim(d, 0),
    "sorted": lambda x, d: x.sort(d).values,
    "index_select": lambda x, d: x.index_select(d, torch.tensor([0, 0])),
    "glu": lambda x, d: F.glu(x, d) if x.shape[d] % 2 == 0 else x,
}
_MODULES: dict[str, Op] = {
    "linear": lambda m, a, b, k: F.linear(
        a, m.weight("w", 4 + 2 * (k % 3), a.shape[-1]), m.weight("wb", 4 + 2 * (k % 3))
    ),
    "shared_linear": lambda m, a, b, k: F.linear(a, m.weight("shared", a.shape[-1], a.shape[-1])),
    "matmul": lambda m, a, b, k: a @ a.transpose(-1, -2) if a.dim() > 1 else a,
    "einsum": lambda m, a, b, k: torch.einsum("nsf,nsg->nfg", _rows(a), _rows(a)),
    "layer_norm": lambda m, a, b, k: F.layer_norm(a, a.shape[-1:], m.weight("ln", a.shape[-1])),
    "rms_norm": lambda m, a, b, k: F.rms_norm(a, a.shape[-1:], m.weight("rms", a.shape[-1])),
    "group_norm": lambda m, a, b, k: F.group_norm(_rows(a), 2 if _rows(a).shape[1] % 2 == 0 else 1),
    "pad": lambda m, a, b, k: F.pad(a, ((1, 0), (1, -1), (0, 2))[k % 3]),
    "attention": _attention,
    "explicit_attention": _explicit_attention,
    "conv": _conv,
    "batch_norm": _batch_norm,
    "in_place_slice": _in_place_slice,
    "assign": _assign,
    "counted": _counted,
    "gather": _gather,
    "embedding": _embedded,
    "unflatten": _unfolded,
    "cat": _cat,
    "halves": _halves,
    "branch": lambda m, a, b, k: a if len(m.program) % 2 else a + 1,
}


def _of_one(call: Callable[[torch.Tensor], torch.Tensor]) -> Op:
    return lambda m, a, b, k: call(a)


def _of_two(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Op:
    return lambda m, a, b, k: call(a, _like(b, a))


def _of_dim(call: Callable[[torch.Tensor, int], torch.Tensor]) -> Op:
    return lambda m, a, b, k: call(a, _dim(a, k)) if a.dim() else a


def _of_rows(call: Op) -> Op:
    """An operator that needs a dimension, of a tensor that may have none."""
    return lambda m, a, b, k: call(m, a if a.dim() else a.unsqueeze(0), b, k)


OPS: dict[str, Op] = {
    **{name: _of_one(call) for name, call in _ONE.items()},
    **{name: _of_two(call) for name, call in _TWO.items()},
    **{name: _of_dim(call) for name, call in _ALONG.items()},
    **{name: _of_rows(call) for name, call in _MODULES.items()},
}

steps = st.builds(
    Step, st.sampled_from(sorted(OPS)), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)
)
programs = st.lists(steps, min_size=1, max_size=_MOST_STEPS).map(tuple)
