"""Observes autograd on one call: which results require gradients and which tensors it saves.

The call is run alone on meta tensors, so nothing is computed or allocated. `autograd_probe` runs
equal calls once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class AutogradFacts:
    """Facts of one call under autograd; operands and results by position.

    * `requires_grad[i]`: result i requires a gradient;
    * `alias_of[i]`: the operand whose memory result i shares, or -1;
    * `saved_operands`, `saved_results`: tensors saved for the backward pass;
    * `extra_saved`: further bytes saved;
    * `flop`: floating-point operations of an opaque module, forward and backward; else 0.
    """

    requires_grad: tuple[bool, ...]
    alias_of: tuple[int, ...]
    saved_operands: tuple[int, ...]
    saved_results: tuple[int, ...]
    extra_saved: int
    flop: int = 0


def observe(
    call: Callable[[list[torch.Tensor]], list[torch.Tensor]], operands: list[torch.Tensor]
) -> AutogradFacts:
    """Run `call` on meta `operands` (leaves that require grad or not) and record what it saves."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        results = call(operands)
    # Storage objects keep their identity while a tensor holds them.
    storages = [tensor.untyped_storage() for tensor in operands]
    alias_of = tuple(_position(r, storages) for r in results)
    result_storages = [r.untyped_storage() for r in results]
    saved_operands: set[int] = set()
    saved_results: set[int] = set()
    extra = 0
    seen: list[torch.UntypedStorage] = []
    for tensor in kept:
        storage = tensor.untyped_storage()
        if (at := _position(tensor, storages)) >= 0:
            saved_operands.add(at)
        elif (at := _position(tensor, result_storages)) >= 0:
            saved_results.add(at)
        elif not any(storage is other for other in seen):
            seen.append(storage)
            extra += storage.nbytes()  # a view keeps its whole storage alive
    return AutogradFacts(
        requires_grad=tuple(isinstance(r, torch.Tensor) and r.requires_grad for r in results),
        alias_of=alias_of,
        saved_operands=tuple(sorted(saved_operands)),
        saved_results=tuple(sorted(saved_results)),
        extra_saved=extra,
    )


def _position(tensor: Any, storages: list[Any]) -> int:
    storage = tensor.untyped_storage()
    return next((i for i, other in enumerate(storages) if storage is other), -1)
