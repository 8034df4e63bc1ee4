"""One batch of a job as the arguments of the model's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Batch = Mapping[str, Any] | tuple[Any, ...]  # keyword or positional arguments of the model
Call = tuple[tuple[Any, ...], dict[str, Any]]


class JobError(ValueError):
    """The job cannot be planned or trained as it is declared."""


def call_of(name: str, batch: Batch) -> Call:
    """Positional and keyword arguments of a batch; errors name `name` as its source."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise JobError(
        f"{name} gives a {type(batch).__name__}; give a mapping of keyword arguments, or a tuple"
        " of positional ones"
    )
