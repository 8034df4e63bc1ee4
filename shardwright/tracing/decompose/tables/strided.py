"""Operators on memory: `as_strided` as a look-up, and writes to parts of complex tensors.

`as_strided` reads memory, and a tile, or a tensor that was gathered, lies in memory otherwise than
the tensor of the trace. Which element is at which address is known when the model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.tracing.call import CaptureError

aten: Any = torch.ops.aten


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """The elements of `x` at addresses `storage_offset` + sum of index times `stride`, of `size`.

    Windows of rows are looked up in each row, so that rows can be split.
    """
    start = 0 if storage_offset is None else storage_offset - int(x.storage_offset())
    rows = bool(size) and x.dim() > 1 and not start
    rows = rows and (size[0], stride[0]) == (x.shape[0], x.stride(0))
    if rows and _all_of(size[1:], stride[1:], 0, x.shape[1:], x.stride()[1:]):
        at = _numbers(size[1:], stride[1:], 0, x.shape[1:], x.stride()[1:], x.device)
        return x.reshape(x.shape[0], -1)[:, at]
    if not _all_of(size, stride, start, x.shape, x.stride()):
        raise CaptureError(
            f"as_strided with sizes {tuple(size)} and strides {tuple(stride)} reads memory that is"
            f" no element of its tensor of sizes {tuple(x.shape)} and strides {x.stride()}; read"
            " the tensor that has these elements"
        )
    return x.reshape(-1)[_numbers(size, stride, start, x.shape, x.stride(), x.device)]


def _all_of(
    size: Sequence[int],
    stride: Sequence[int],
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> bool:
    """Whether all addresses are those of elements of a tensor of `shape` and `strides`."""
    address = np.full((), start)
    for count, step in zip(size, stride, strict=True):
        address = address[..., None] + np.arange(count) * step
    found = np.zeros_like(address)
    for step, count in zip(strides, shape, strict=True):
        if count > 1 and step == 0:  # several elements at one address
            return False
        if count > 1:
            found += address // step % count * step
    return bool((found == address).all())


def _numbers(
    size: Sequence[int],
    stride: Sequence[int],
    start: int,
    shape: Sequence[int],
    strides: Sequence[int],
    device: torch.device,
) -> Tensor:
    """The number of the element, in order of indices, at each address."""
    address = torch.full((), start, dtype=torch.int64, device=device).expand(tuple(size))
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(count, device=device) * step
        address = address + along.view(-1, *(1,) * (len(size) - dim - 1))
    found, number = torch.zeros_like(address), 1
    for step, count in reversed([*zip(strides, shape, strict=True)]):
        if count > 1:
            found = found + (address // step) % count * number
        number *= count
    return found


def _of_parts(operator: Any) -> Callable[..., Any]:
    """A write to a part of a complex tensor as one of its real and imaginary numbers.

    That of complex tensors has no derivative.
    """

    def decomposed(x: Tensor, part: Tensor, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        whole, numbers = torch.view_as_real(x.resolve_conj()), part.to(x.dtype).resolve_conj()
        at = dim % x.dim()
        return torch.view_as_complex(
            operator(whole, torch.view_as_real(numbers), at, *args, **kwargs)
        )

    return decomposed


def table() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator."""
    parts = (aten.slice_scatter.default, aten.select_scatter.default)
    return {aten.as_strided.default: _as_strided, **{one: _of_parts(one) for one in parts}}
