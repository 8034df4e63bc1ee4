"""Swaps the weights that a backward pass reads, with saved-tensor hooks.

Where autograd would save a weight, it saves which one it is: what lies in the
memory of a weight is a view of it. When the backward pass runs, the view is
taken of the weight that is due by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from shardwright.runtime.parameters.storage_view import StorageView


@final
class WeightSwap:
    """The weights of one stage: those that the forward pass runs with, those due in the other."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # where a weight of the forward pass lies -> which it is
        self.due: Sequence[torch.Tensor] = ()

    def track(self, weights: Sequence[torch.Tensor]) -> None:
        """From now on `weights` are recognised, as long as they are alive."""
        self.numbers = {
            weight.untyped_storage().data_ptr(): number
            for number, weight in enumerate(weights)
            if weight.numel() > 0
        }

    def pack(self, tensor: torch.Tensor) -> Any:
        """Saves the number of a weight instead of `tensor`."""
        number = self.numbers.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return tensor
        return number, StorageView.of(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor, of the weights that are due."""
        if isinstance(packed, torch.Tensor):
            return packed
        number, view = packed
        weight: torch.Tensor = view.on(self.due[number].detach())
        return weight

    def later(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        """`source`, for a backward pass that makes something of it anew."""
        packed = self.pack(source.detach())
        return lambda: self.unpack(packed)
