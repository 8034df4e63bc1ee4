"""Frees gathered copies of sharded parameters after forward and gathers them again for backward.

Where autograd would save a gathered copy, saved-tensor hooks
(`torch.autograd.graph.saved_tensors_hooks`) save a reference to its source instead. They are active
for one operator at a time, while the copy is alive and its memory cannot be reused.

Paper: ZeRO stage 3 (arXiv 1910.02054); FSDP calls it resharding after forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwright.runtime.parameters.storage_view import StorageView

Keep = Callable[[torch.Tensor], Callable[[], torch.Tensor]]


def as_it_is(source: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Keep a parameter's tile for the backward pass as it is in the forward pass."""
    kept = source.detach()
    return lambda: kept


class CopySource(Protocol):
    """Makes a copy of a parameter, in the forward pass and again in the backward pass."""

    def keep(self, source: Any, how: Keep, /) -> Callable[[], Any]:
        """A function that returns the source for `run_forward` later; `how` keeps tiles."""

    def run_forward(self, source: Any, /) -> torch.Tensor:
        """The copy, made from the source."""


@dataclass(frozen=True, slots=True, eq=False)
class _Dropped:
    """A view of a copy that was not kept, and the source from which it is made again."""

    source: Callable[[], Any]
    number: int  # of the source that makes the copy
    view: StorageView


class ReshardAfterForward(nn.Module):
    """One operator that keeps nothing of the copies that `again` makes.

    The order of the program is the same on every rank, and so is the order of autograd's backward
    pass: all ranks gather the same copy at the same time.
    """

    def __init__(
        self,
        operator: Callable[..., Any],
        again: Sequence[CopySource],
        keep: Keep = as_it_is,
    ) -> None:
        super().__init__()
        self.keep = keep
        self.operator = operator
        self.again = tuple(again)  # not a ModuleList: the program has them

    def forward(
        self,
        sources: Sequence[Any],
        copies: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """The operator's result; `again[i]` made `copies[i]` from `sources[i]`."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.operator(*args, **kwargs)  # a compiler decides itself what is kept
        numbers = {copy.untyped_storage().data_ptr(): i for i, copy in enumerate(copies)}

        def pack(kept: torch.Tensor) -> torch.Tensor | _Dropped:
            number = numbers.get(kept.untyped_storage().data_ptr())
            if number is None:
                return kept
            source = self.again[number].keep(sources[number], self.keep)
            return _Dropped(source, number, StorageView.of(kept))

        with saved_tensors_hooks(pack, self._unpack):
            return self.operator(*args, **kwargs)

    def _unpack(self, kept: torch.Tensor | _Dropped) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        with torch.no_grad():
            copy = self.again[kept.number].run_forward(kept.source())
        return kept.view.on(copy)
