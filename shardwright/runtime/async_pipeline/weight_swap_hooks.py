"""Swaps the weights that a backward pass reads, with saved-tensor hooks.

Where autograd would save a weight, or a view of one (recognised by its storage), it saves the
weight's index instead. In the backward pass the view is taken of the weight version that this pass
should use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from shardwright.runtime.parameters.storage_view import StorageView


@final
class WeightSwap:
    """The weights of one stage: those of the forward pass and those for the backward pass."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # storage address of a forward weight -> its index
        self.due: Sequence[torch.Tensor] = ()

    def track(self, weights: Sequence[torch.Tensor]) -> None:
        """Recognise `weights` from now on, as long as they are alive."""
        self.numbers = {
            weight.untyped_storage().data_ptr(): number
            for number, weight in enumerate(weights)
            if weight.numel() > 0
        }

    def pack(self, tensor: torch.Tensor) -> Any:
        """The index of a weight and the form of its view, or `tensor` if it is not a weight."""
        number = self.numbers.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return tensor
        return number, StorageView.of(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor, read from the weights for the backward pass."""
        if isinstance(packed, torch.Tensor):
            return packed
        number, view = packed
        weight: torch.Tensor = view.on(self.due[number].detach())
        return weight

    def later(self, source: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that returns `source` for recomputation in the backward pass."""
        packed = self.pack(source.detach())
        return lambda: self.unpack(packed)
