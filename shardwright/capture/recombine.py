"""What results of two tiles make when they are put together, compared with a whole's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def put_together(
    whole: torch.Tensor, one: torch.Tensor, other: torch.Tensor, size: int, length: int
) -> tuple[int, int] | str:
    """(dimension, repeats) of a concatenation, "sum", or "neither"."""
    if one.shape == whole.shape == other.shape:
        summed = whole.is_floating_point() and bool(whole.any()) and equal(one + other, whole)
        return "sum" if summed else "neither"
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
    """Gradients of the weighted sum of the results; none where there is no derivative."""
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
    except (RuntimeError, NotImplementedError):  # what torch raises for an operator without one
        return {}
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(leaves.items(), found, strict=True)
    }


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same up to rounding in the tensors' precision."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = 1e-4 if one.dtype == torch.float32 else 1e-9
    return torch.allclose(one, other, rtol=close, atol=close, equal_nan=True)
