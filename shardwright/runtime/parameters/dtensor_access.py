"""Corrects two silent behaviours of DTensors that scripts for one device meet.

* `tensor.data = other` leaves a DTensor's values as they are (torch 2.13). Averages of weights are
  swapped in so. Here the tile is replaced, as the data of a plain tensor is.
* A number read from a DTensor that is a term of a sum, as `p.grad.norm().item()` on sharded
  parameters, is that of this rank's tile. Here the sum is taken first, by a collective, so that
  every rank must read it.

Both are changed for the whole process: results of operators are of torch's own class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwright.runtime.parameters.state_dicts import StateDictError, tile_of

_READS = ("item", "__bool__", "__int__", "__float__", "__complex__", "__index__")
_DATA: Any = torch.Tensor.data  # the descriptor
_mended: list[Callable[..., Any]] = []


def mend_dtensors() -> None:
    """Apply both corrections in this process; a second call does nothing."""
    if _mended:
        return
    for name in _READS:
        _mended.append(getattr(torch.Tensor, name))
        setattr(DTensor, name, _of_whole(_mended[-1]))
    DTensor.data = property(_data, _set_data)  # type: ignore[assignment]


def _of_whole(read: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(read)
    def read_whole(self: DTensor) -> Any:
        if all(placement.is_replicate() for placement in self.placements):
            return read(self)
        detached: Any = self.detach()
        return read(detached.full_tensor())

    return read_whole


def _data(self: DTensor) -> torch.Tensor:
    found: torch.Tensor = _DATA.__get__(self)
    return found


def _set_data(self: DTensor, value: torch.Tensor) -> None:
    """Replace the tile: by that of another DTensor, redistributed, or one cut of a whole tensor."""
    if value.shape != self.shape or value.dtype != self.dtype:
        raise StateDictError(
            f"{value.dtype} of {tuple(value.shape)} is assigned to the data of a DTensor, which is"
            f" {self.dtype} of {tuple(self.shape)}; assign the same, or cast the module"
        )
    with torch.no_grad():
        if isinstance(value, DTensor):
            placed = value.redistribute(self.device_mesh, self.placements)
        else:
            placed = tile_of(value, self)
        _DATA.__set__(self, placed)
        self._local_tensor = placed._local_tensor  # private: what torch's own setter leaves out
