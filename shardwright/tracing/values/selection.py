"""Registers operators for selections whose number of elements is known when a model is captured.

`x[mask]` has as many elements as the mask has True. If the example batch says how many, the
positions are a tensor of fixed size, and the operator raises at run time for another number.

Importing this file registers the operators `positions`, `all_true`, `placements` and
`expected`.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXPECTED = "shardwright.expected.default"  # args: truth value, wanted one, user's line, `checks`


@torch.library.custom_op("shardwright::positions", mutates_args=())
def positions(mask: Tensor, count: int) -> Tensor:
    """The positions of the True elements of `mask`, int64 (count, dimensions of the mask).

    Raises `RuntimeError` unless there are `count`.
    """
    found = mask.nonzero()
    if found.shape[0] != count:
        raise RuntimeError(_other_count(mask, found.shape[0], count))
    return found


@positions.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((count, mask.dim()), dtype=torch.int64)


@torch.library.custom_op("shardwright::all_true", mutates_args=())
def all_true(mask: Tensor) -> Tensor:
    """A copy of `mask`; raises `RuntimeError` unless all of it is True."""
    if not bool(mask.all()):
        raise RuntimeError(_other_count(mask, int(mask.sum()), mask.numel()))
    return mask.clone()


@all_true.register_fake
def _(mask: Tensor) -> Tensor:
    return torch.empty_like(mask)


@torch.library.custom_op("shardwright::placements", mutates_args=())
def placements(mask: Tensor, count: int) -> Tensor:
    """For each element of `mask`, how many True are before it, int64; 0 to `count` - 1.

    Raises `RuntimeError` if more than `count` are True: `masked_scatter` has no more rows to place.
    """
    found = mask.reshape(-1).cumsum(0)
    if found.numel() and int(found[-1]) > count:
        raise RuntimeError(
            f"{int(found[-1])} elements of the mask of shape {tuple(mask.shape)} are True, and the"
            f" source of masked_scatter has rows for {count}: give as many"
        )
    return (found - 1).clamp(0, max(0, count - 1)).view(mask.shape)


@placements.register_fake
def _(mask: Tensor, count: int) -> Tensor:
    return torch.empty_like(mask, dtype=torch.int64, memory_format=torch.contiguous_format)


@torch.library.custom_op("shardwright::expected", mutates_args=())
def expected(value: Tensor, wanted: bool, line: str, checks: bool) -> Tensor:
    """True; raises `RuntimeError` unless `value`, of no dimension, is `wanted`.

    The code at `line` decided by the value when the model was captured, or `checks` it and raises.
    """
    if bool(value) is not wanted and checks:
        raise RuntimeError(f"the check of values at {line} fails for this batch")
    if bool(value) is not wanted:
        raise RuntimeError(
            f"{line} decides by a value of this batch otherwise than by that of the example batch,"
            " and the captured graph has one decision only: capture and plan with this batch, or"
            " express it with torch.where"
        )
    return torch.ones_like(value)


@expected.register_fake
def _(value: Tensor, wanted: bool, line: str, checks: bool) -> Tensor:
    return torch.empty_like(value)


def _other_count(mask: Tensor, found: int, count: int) -> str:
    return (
        f"{found} elements of a mask of shape {tuple(mask.shape)} are True, and the plan was made"
        f" with {count}, which its sizes depend on: give a batch with {count}, or capture and plan"
        " with this one"
    )
