"""Defines a batch of a job: the arguments of one call of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Batch = Mapping[str, Any] | tuple[Any, ...]  # keyword or positional arguments of the model
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


class JobError(ValueError):
    """The job cannot be planned or trained as it is declared."""


def call_of(name: str, batch: Batch) -> Call:
    """Positional and keyword arguments of a batch.

    Raises `JobError`, with `name` as the source, for other types than mappings and tuples.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple):
        return batch, {}
    raise JobError(
        f"{name} gives a {type(batch).__name__}; give a mapping of keyword arguments, or a tuple"
        " of positional ones"
    )
