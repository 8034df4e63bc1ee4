"""Two things that PyTorch's optimizers do wrong, or not at all, with sharded parameters.

`torch.optim.Adafactor` squares partial norms in place, which DTensor refuses (seen with torch 2.13;
FSDP's parameters meet the same): while it steps, norms are summed up as soon as they are made.
And an optimizer state that `torch.load` brought from another rank's file has that rank's tiles in
it; its device mesh still tells their place, so it is refused before the first step with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

_NORMS = (torch.norm, torch.linalg.vector_norm, torch.Tensor.norm)


class _SummedNorms(TorchFunctionMode):
    """Norms along sharded dimensions come out whole instead of as partial norms."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _NORMS and isinstance(found, DTensor):
            whole = [Replicate() if p.is_partial() else p for p in found.placements]
            return found.redistribute(placements=whole)
        return found


_entered: list[_SummedNorms] = []  # at most one; one that an error left behind is used again


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, torch.optim.Adafactor) and _sharded(optimizer) and not _entered:
        _entered.append(_SummedNorms())
        _entered[0].__enter__()


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _entered and isinstance(optimizer, torch.optim.Adafactor):
        _entered.pop().__exit__(None, None, None)


def _sharded(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


_registered: list[Any] = []


def mend_optimizers() -> None:
    """From now on, in this process; a second call does nothing."""
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before))
        _registered.append(register_optimizer_step_post_hook(_after))
