"""Flattens arguments and results of a module into tensors and a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for the tensor of this number."""

    number: int


def split_tensors(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with slots in place of its tensors, and the tensors.

    >>> split_tensors({"a": (torch.zeros(1), 2)})
    ({'a': (Slot(number=0), 2)}, [tensor([0.])])
    """
    tensors: list[torch.Tensor] = []
    return _split(value, tensors), tensors


def join_tensors(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `split_tensors`, with the given tensors."""
    if isinstance(structure, Slot):
        return tensors[structure.number]
    return _rebuilt(structure, lambda part: join_tensors(part, tensors))


# Not a closure that calls itself: it would keep the tensors until garbage collection.
def _split(part: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        return Slot(len(tensors) - 1)
    return _rebuilt(part, lambda item: _split(item, tensors))


def _rebuilt(part: Any, visit: Any) -> Any:
    """A container with its items visited; other values unchanged."""
    if isinstance(part, Mapping):
        items = {key: visit(item) for key, item in part.items()}
        return items if type(part) is dict else type(part)(**items)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(visit, part))
    if isinstance(part, tuple | list):
        return type(part)(visit(item) for item in part)
    return part
