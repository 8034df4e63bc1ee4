"""Disables activation checkpointing inside a model while it is captured.

The plan decides which values are recomputed, and recomputation does not change results. So
`torch.utils.checkpoint.checkpoint` calls its function directly.

Replacing `checkpoint` itself would miss references that a model holds already (`from
torch.utils.checkpoint import checkpoint`, or the partial that Hugging Face models store), so the
two functions that it calls are replaced. One of them, `_checkpoint_without_reentrant_generator`, is
a private name of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction

from shardwright.tracing.export.patches import Patches

_WITHOUT_REENTRANT = "_checkpoint_without_reentrant_generator"
NOTE = "torch.utils.checkpoint is left out: which values are recomputed is the choice of the plan"


class CheckpointedFunctions:
    """The checkpointed functions seen while a model was captured."""

    def __init__(self) -> None:
        self.count = 0
        self.without_gradient = 0

    def note(self) -> str:
        """One line about disabled checkpoints; empty if there were none."""
        if not self.count:
            return ""
        if not self.without_gradient:
            return NOTE
        return (
            f"{NOTE}; {self.without_gradient} of its calls have use_reentrant=True and no input"
            " that requires a gradient, so parameters inside get none, as in the model"
        )


_now: ContextVar[CheckpointedFunctions | None] = ContextVar("checkpoints", default=None)
_patches = Patches()


@contextmanager
def checkpointing_disabled() -> Iterator[CheckpointedFunctions]:
    """A context, for this thread only, in which checkpointed functions are called directly."""
    found = CheckpointedFunctions()
    token = _now.set(found)
    try:
        with _patches.applied(_patch):
            yield found
    finally:
        _now.reset(token)


def _patch() -> Callable[[], None]:
    """Replace both kinds of checkpoint by plain calls, which are counted; returns the undo."""
    patched: Any = CheckpointFunction
    apply = patched.apply  # bound to the class
    generator = getattr(torch_checkpoint, _WITHOUT_REENTRANT)

    def without_reentrant(*args: Any, **kwargs: Any) -> Any:
        found = _now.get()
        if found is None:
            yield from generator(*args, **kwargs)
            return
        found.count += 1
        yield

    def reentrant(cls: Any, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        found = _now.get()
        if found is None:
            return apply(function, preserve, *args)
        found.count += 1
        if torch.is_grad_enabled() and not any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in args
        ):
            found.without_gradient += 1
            with torch.no_grad():
                return function(*args)
        return function(*args)

    setattr(torch_checkpoint, _WITHOUT_REENTRANT, without_reentrant)
    patched.apply = classmethod(reentrant)

    def undo() -> None:
        setattr(torch_checkpoint, _WITHOUT_REENTRANT, generator)
        del patched.apply

    return undo
