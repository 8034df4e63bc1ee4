"""One batch of a job, and the arguments of the call that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Batch = Mapping[str, Any] | tuple[Any, ...]  # keyword or positional arguments of the model
Call = tuple[tuple[Any, ...], dict[str, Any]]


class JobError(ValueError):
    """A job that cannot be planned or trained as its author declared it."""


def call_of(name: str, batch: Batch) -> Call:
    """Positional and keyword arguments of a batch; `name` is what gave it."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise JobError(
        f"{name} gives a {type(batch).__name__}; give a mapping of keyword arguments, or a tuple"
        " of positional ones"
    )
