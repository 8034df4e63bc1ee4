"""Flattens arguments and results of a module into tensors and a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the tensor of this number was."""

    number: int


def take_apart(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """`value` with slots for its tensors, and these.

    >>> take_apart({"a": (torch.zeros(1), 2)})
    ({'a': (Slot(number=0), 2)}, [tensor([0.])])
    """
    tensors: list[torch.Tensor] = []

    def walk(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            return Slot(len(tensors) - 1)
        return _rebuilt(part, walk)

    return walk(value), tensors


def put_back(around: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """What `take_apart` took apart, with other tensors."""

    def walk(part: Any) -> Any:
        return tensors[part.number] if isinstance(part, Slot) else _rebuilt(part, walk)

    return walk(around)


def _rebuilt(part: Any, walk: Any) -> Any:
    """A container with its parts walked; anything else as it is."""
    if isinstance(part, Mapping):
        items = {key: walk(item) for key, item in part.items()}
        return items if type(part) is dict else type(part)(**items)
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*map(walk, part))
    if isinstance(part, tuple | list):
        return type(part)(walk(item) for item in part)
    return part
