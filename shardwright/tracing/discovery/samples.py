"""Sample operands for the experiments: values that distinguish operators.

A sample specifies the family from which the values of each type of operand are drawn. A rule must
hold for all samples, because the behaviour of an operator may depend on its data: a mask that is
all false, an index that occurs twice, a tie. Some samples have a single outlier, so that it is in
one tile only, wherever the cut is. For an operator that rejects arbitrary values, operands are
drawn from a domain, such as the positive definite matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch
from torch import Tensor as Values

from shardwright.ir.graph import Tensor

Shape = tuple[int, ...]
Family = tuple[str, str, str]  # of floating-point numbers, integers and booleans

# The first sample has operands that most operators accept.
ORDINARY: tuple[Family, ...] = (
    ("positive", "positive", "random"),
    ("around zero", "random", "random"),
    ("around zero", "random", "true"),
    ("around zero", "random", "false"),
    ("ties", "duplicates", "random"),
    ("large", "last", "random"),
    ("tiny", "zeros", "true"),
    ("mixed", "random", "random"),
    ("constant", "duplicates", "true"),
    ("negative", "ascending", "random"),
    ("zeros", "zeros", "false"),
    ("one positive", "one apart", "one true"),
    ("one large", "one apart", "one false"),
    ("any", "any", "any"),
    ("any", "any", "any"),
)
# Values that may crash native code.
HARSH: tuple[Family, ...] = (
    ("not finite", "random", "random"),
    ("around zero", "signed", "true"),
    ("one infinite", "one negative", "one true"),
)
DOMAINS = ("", "no zero", "unit", "probability", "positive definite", "triangular", "orthogonal")
# Domain of each operand, for operators that compute something else outside of it, without an error.
_OPERANDS = {
    "cholesky_inverse": ("triangular",),
    "cholesky_solve": ("", "triangular"),
    "linalg_householder_product": ("orthogonal",),
}


def domains_of(kind: str) -> tuple[str, ...]:
    """The domains in which an operator is tried, in this order; the empty one has all values."""
    return ("",) if kind in _OPERANDS else DOMAINS


def sample(
    kind: str,
    described: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    float_dtype: torch.dtype,
    domain: str,
    number: int,
) -> dict[str, Values]:
    """The operands of sample `number`, by name, on the CPU; equal arguments give equal operands.

    `described` has the dtype of each operand and whether it requires gradients, `shapes` its shape.
    Floating-point operands have `float_dtype`, complex ones the complex dtype of that precision.
    """
    families = (*ORDINARY, *HARSH)
    generator = torch.Generator(device="cpu").manual_seed(number)
    below = min((size for shape in shapes.values() for size in shape if size > 1), default=2)
    most = max((prod(shape) for shape in shapes.values()), default=1)
    limits = _OPERANDS.get(kind, ())
    found = {}
    for i, (name, tensor) in enumerate(described.items()):
        limit = limits[i] if i < len(limits) else domain
        draw = _Draw(shapes[name], generator, below, most)
        dtype = getattr(torch, tensor.dtype)
        floats, integers, booleans = families[number]
        if dtype.is_complex:
            parts = [draw.floats(floats, limit) for _ in range(2)]
            found[name] = torch.complex(*parts).to(float_dtype.to_complex())
        elif dtype.is_floating_point:
            found[name] = draw.floats(floats, limit).to(float_dtype)
        elif dtype == torch.bool:
            found[name] = draw.booleans(booleans)
        else:
            found[name] = draw.integers(integers, limit).to(dtype)
        found[name].requires_grad_(tensor.requires_grad and _differentiable(dtype))
    return found


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _Draw:
    """Draws the values of one operand of a `shape`; integers are smaller than `below`."""

    def __init__(self, shape: Shape, generator: torch.Generator, below: int, most: int) -> None:
        self.shape, self.below, self.most = shape, below, most
        self.generator = generator

    def _unit(self) -> Values:
        return torch.rand(self.shape, generator=self.generator, dtype=torch.float64, device="cpu")

    def _below(self, high: int, low: int = 0) -> Values:
        return torch.randint(low, high, self.shape, generator=self.generator, device="cpu")

    def _one_of(self, names: tuple[str, ...]) -> str:
        return names[int(torch.randint(len(names), (), generator=self.generator, device="cpu"))]

    def floats(self, family: str, domain: str) -> Values:
        """Float64 numbers of a family.

        In a domain of `_MOVED` they are numbers of the domain instead; some of those domains scale
        them up for the family "large" and down for "tiny".
        """
        if family == "any":
            family = self._one_of(tuple(f for f in _FLOATS if f not in _RISKY))
        drawn = _FLOATS[family](self)
        if domain not in _MOVED:
            return drawn
        tame = 4.0 * self._unit() - 2.0
        size = {"large": 1e4, "tiny": 1e-4}.get(family, 1.0)
        return _MOVED[domain](tame, size)

    def integers(self, family: str, domain: str) -> Values:
        """Int64 numbers that are indices of every dimension longer than one.

        In the domain "no zero" they are positive, and so valid divisors.
        """
        if family == "any":
            family = self._one_of(tuple(f for f in _INTEGERS if f not in _RISKY))
        drawn = _INTEGERS[family](self)
        return drawn.abs() + 1 if domain == "no zero" else drawn

    def booleans(self, family: str) -> Values:
        if family == "any":
            family = self._one_of(tuple(_BOOLEANS))
        return _BOOLEANS[family](self)

    def with_outlier(self, drawn: Values, value: float) -> Values:
        """`drawn` with one element, at a random index, replaced by `value`."""
        at = int(self._below(2**30).flatten()[0]) if drawn.numel() else 0
        flat = drawn.flatten()
        flat[at % max(1, flat.numel()) : at % max(1, flat.numel()) + 1] = value
        return flat.view(drawn.shape)

    def with_values_inserted(self, values: tuple[float, ...]) -> Values:
        """Numbers between -2 and 2, about a fifth of them replaced by one of `values`."""
        drawn = 4.0 * self._unit() - 2.0
        chosen = torch.tensor(values, dtype=drawn.dtype)[self._below(len(values))]
        return torch.where(self._unit() < 0.2, chosen, drawn)


_FLOATS: dict[str, Callable[[_Draw], Values]] = {
    "positive": lambda d: 0.1 + 0.8 * d._unit(),
    "negative": lambda d: -0.1 - 0.8 * d._unit(),
    "around zero": lambda d: 4.0 * d._unit() - 2.0,
    "ties": lambda d: d._below(2, -1).double(),
    "large": lambda d: 1e4 * (4.0 * d._unit() - 2.0),
    "tiny": lambda d: 1e-6 * (4.0 * d._unit() - 2.0),
    "mixed": lambda d: (4.0 * d._unit() - 2.0) * 10.0 ** d._below(3, -3),
    "constant": lambda d: torch.full(d.shape, 0.5, dtype=torch.float64),
    "zeros": lambda d: torch.zeros(d.shape, dtype=torch.float64),
    "one positive": lambda d: d.with_outlier(-0.1 - 0.8 * d._unit(), 0.7),
    "one large": lambda d: d.with_outlier(1e-6 * (4.0 * d._unit() - 2.0), 1e4),
    "one infinite": lambda d: d.with_outlier(4.0 * d._unit() - 2.0, float("inf")),
    "not finite": lambda d: d.with_values_inserted((float("inf"), float("-inf"))),
}
_INTEGERS: dict[str, Callable[[_Draw], Values]] = {
    "positive": lambda d: d._below(d.below, min(1, d.below - 1)),
    "random": lambda d: d._below(d.below),
    "duplicates": lambda d: d._below(min(2, d.below)),
    "last": lambda d: torch.full(d.shape, d.below - 1),
    "zeros": lambda d: torch.zeros(d.shape, dtype=torch.int64),
    "ascending": lambda d: torch.arange(prod(d.shape)).remainder(d.below).view(d.shape),
    "one apart": lambda d: d.with_outlier(torch.zeros(d.shape, dtype=torch.int64), d.below - 1),
    "one negative": lambda d: d.with_outlier(d._below(d.below), -1),
    "signed": lambda d: d._below(d.below, -d.below),
}
_BOOLEANS: dict[str, Callable[[_Draw], Values]] = {
    "random": lambda d: d._below(2).bool(),
    "true": lambda d: torch.ones(d.shape, dtype=torch.bool),
    "false": lambda d: torch.zeros(d.shape, dtype=torch.bool),
    "one true": lambda d: d.with_outlier(torch.zeros(d.shape, dtype=torch.bool), True),
    "one false": lambda d: d.with_outlier(torch.ones(d.shape, dtype=torch.bool), False),
}


def _positive_definite(x: Values, size: float) -> Values:
    if not _square(x):
        return x
    return size * (x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype))


def _triangular(x: Values, size: float) -> Values:
    if not _square(x):
        return x
    return size * (x.tril() + 2 * x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype))


def _orthogonal(x: Values, size: float) -> Values:
    return torch.linalg.qr(x).Q if x.dim() > 1 and x.shape[-2] >= x.shape[-1] else x


def _square(x: Values) -> bool:
    return x.dim() > 1 and x.shape[-1] == x.shape[-2]


_MOVED: dict[str, Callable[[Values, float], Values]] = {
    "unit": lambda x, size: 0.5 + 0.24 * x,
    "probability": lambda x, size: x.softmax(-1) if x.dim() else x.sigmoid(),
    "positive definite": _positive_definite,
    "triangular": _triangular,
    "orthogonal": _orthogonal,
}
_RISKY = ("not finite", "one infinite", "signed", "one negative")
