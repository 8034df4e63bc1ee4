"""Recombines the results of two tiles and compares them with the result of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def recombine_tiles(
    whole: torch.Tensor, one: torch.Tensor, other: torch.Tensor, size: int, length: int
) -> tuple[int, int] | str:
    """The way in which the results `one` and `other` of two tiles give the result `whole`.

    `size` and `length` are the lengths of the split dimension in the whole and in the first tile.
    Returns (dimension, repeats) where the results are concatenated along a dimension of length
    repeats * size, "sum" where they are added, and "neither" otherwise.
    """
    if one.shape == whole.shape == other.shape:
        return "sum" if _has_sums(whole) and equal(one + other, whole) else "neither"
    if one.dim() != whole.dim() or other.dim() != whole.dim():
        return "neither"
    dims = [d for d in range(whole.dim()) if one.shape[d] != whole.shape[d]]
    if len(dims) != 1 or one.shape[dims[0]] + other.shape[dims[0]] != whole.shape[dims[0]]:
        return "neither"
    (dim,) = dims
    repeats, rest = divmod(whole.shape[dim], size)
    if rest or one.shape[dim] != repeats * length or one.shape[:dim] != other.shape[:dim]:
        return "neither"
    return (dim, repeats) if equal(torch.cat([one, other], dim), whole) else "neither"


def gradients(
    results: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    operands: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Gradients of the weighted sum of the results, by operand that requires one.

    They are zeros for operands that the results do not depend on. Returns an empty dictionary where
    the operator has no derivative, or its backward pass fails.
    """
    leaves = {name: value for name, value in operands.items() if value.requires_grad}
    pairs = [(r, w) for r, w in zip(results, weights, strict=True) if r.requires_grad]
    if not leaves or not pairs:
        return {}
    try:
        found = torch.autograd.grad(
            [r for r, _ in pairs],
            list(leaves.values()),
            [w for _, w in pairs],
            allow_unused=True,
            retain_graph=True,
        )
    except (
        RuntimeError,
        NotImplementedError,
    ):  # torch's error for an operator without a derivative
        return {}
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(leaves.items(), found, strict=True)
    }


def equal(one: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes, equal dtypes, and values equal up to rounding.

    The tolerance is 1e-9 (float64 and complex128) or 1e-4 (other floating-point dtypes) times the
    sum of a number's magnitude and the largest finite magnitude of `whole`, and 1e-13 or 1e-7
    more. Infinities and NaN must be at the same indices. Integers and booleans must be equal.
    """
    if one.shape != whole.shape or one.dtype != whole.dtype:
        return False
    if not _has_sums(whole):
        return torch.equal(one, whole)
    wide = whole.dtype in (torch.float64, torch.complex128)
    close, least = (1e-9, 1e-13) if wide else (1e-4, 1e-7)
    finite = whole.detach().abs()
    finite = finite[finite.isfinite()]
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(one, whole, rtol=close, atol=close * largest + least, equal_nan=True)


def weights_of(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Weights of each result in the sum that is differentiated, different for each element."""
    found = []
    for result in results:
        weight = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).view(result.shape)
        found.append((weight * (1 + 0.5j) if result.is_complex() else weight).to(result.dtype))
    return found


def _has_sums(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
